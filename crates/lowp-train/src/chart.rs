//! Charts of losses and bytes as SVG without any external asset: [`curves`] over steps, and [`bars`]. Colours are the CSS variables `--s0` to `--s7` of the page.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 40.0;
const HEIGHT: f64 = 340.0;

/// Points of a line; more would be closer than two pixels.
const MOST_POINTS: usize = 400;

/// Number of colours; further lines repeat them with other dashes.
pub const COLOURS: usize = 8;
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];

/// One line of a chart, or one bar.
#[derive(Clone, Debug)]
pub struct Series<'a, T> {
    /// What the legend calls the line or the bar.
    pub name: &'a str,
    /// Which colour and dashes, the same for a name on the whole page.
    pub style: usize,
    /// A value per step, or that of the bar.
    pub values: T,
}

/// The CSS of a line or area of style `index`.
pub fn stroke(index: usize) -> String {
    let dashes = DASHES[(index / COLOURS).min(DASHES.len() - 1)];
    format!(
        "stroke:var(--s{});stroke-dasharray:{dashes}",
        index % COLOURS
    )
}

/// Text with the characters that HTML gives a meaning escaped, and those that XML has no form for left out.
pub fn escape(text: &str) -> String {
    text.replace(char::is_control, "")
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Values over steps, one line per series; `unit` stands above the vertical axis. Without finite values the picture says so.
pub fn curves(title: &str, unit: &str, series: &[Series<'_, Vec<f64>>]) -> String {
    let all = || {
        series
            .iter()
            .flat_map(|s| s.values.iter().copied())
            .filter(|v| v.is_finite())
    };
    let steps = series.iter().map(|s| s.values.len()).max().unwrap_or(0);
    let range = all().fold(None, |range: Option<[f64; 2]>, v| {
        Some(range.map_or([v, v], |[low, high]| [low.min(v), high.max(v)]))
    });
    let mut out = open(HEIGHT, title);
    let Some([low, high]) = range else {
        let _ = write!(
            out,
            "<text x=\"{LEFT}\" y=\"{TOP}\">{}: no finite values</text></svg>",
            escape(title)
        );
        return out;
    };
    let grid = Grid::new(low, high, 6.0);
    let ([bottom, top], [first, last]) = (grid.range(), [1.0, steps.max(2) as f64]);
    let x = |step: f64| LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| TOP + (top - value) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
    let (right, base) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for value in grid.lines() {
        let (gy, class) = (y(value), if value == 0.0 { "grid zero" } else { "grid" });
        let _ = write!(
            out,
            "<line class=\"{class}\" x1=\"{LEFT}\" y1=\"{gy:.1}\" x2=\"{right}\" y2=\"{gy:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value:.*}</text>",
            LEFT - 8.0,
            gy + 4.0,
            grid.decimals()
        );
    }
    for step in step_labels(steps) {
        let gx = x(step as f64);
        let _ = write!(
            out,
            "<line class=\"tick\" x1=\"{gx:.1}\" y1=\"{base}\" x2=\"{gx:.1}\" y2=\"{:.1}\"/>\
             <text x=\"{gx:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{step}</text>",
            base + 5.0,
            base + 18.0
        );
    }
    let _ = write!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\">{}</text><text x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">step</text>",
        TOP - 14.0,
        escape(unit),
        HEIGHT - 6.0
    );
    let stride = steps.div_ceil(MOST_POINTS).max(1);
    // The first series is the one to compare with: it lies on top.
    for s in series.iter().rev() {
        let mut points = String::new();
        let drawn = |index: usize| index.is_multiple_of(stride) || index + 1 == s.values.len();
        let values = s.values.iter().enumerate();
        for (index, &value) in values.filter(|(i, v)| drawn(*i) && v.is_finite()) {
            let _ = write!(points, "{:.1},{:.1} ", x(index as f64 + 1.0), y(value));
        }
        let _ = write!(
            out,
            "<polyline style=\"{}\" points=\"{}\"><title>{}</title></polyline>",
            stroke(s.style),
            points.trim_end(),
            escape(s.name)
        );
    }
    out.push_str("</svg>");
    out
}

/// One horizontal bar per entry with its value after it, and a marked value to compare with.
pub fn bars(title: &str, entries: &[Series<'_, f64>], mark: Option<(&str, f64)>) -> String {
    const BAR: f64 = 28.0;
    const VALUES: f64 = 64.0;
    // Names are 13 pixels high; 8.2 a letter is enough in wide fonts too.
    let longest = entries
        .iter()
        .map(|e| e.name.chars().count())
        .max()
        .unwrap_or(0);
    let names = (longest as f64 * 8.2 + 12.0).min(WIDTH / 2.0);
    let values = entries
        .iter()
        .map(|e| e.values)
        .chain(mark.map(|(_, value)| value));
    let largest = values
        .filter(|v| v.is_finite())
        .fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| names + value / largest * (WIDTH - names - VALUES);
    let height = TOP + BAR * entries.len() as f64;
    let mut out = open(height, title);
    if let Some((label, value)) = mark {
        let gx = x(value);
        let _ = write!(
            out,
            "<line class=\"mark\" x1=\"{gx:.1}\" y1=\"{:.1}\" x2=\"{gx:.1}\" y2=\"{height:.1}\"/>\
             <text x=\"{gx:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} {value:.3}</text>",
            TOP - 8.0,
            TOP - 13.0,
            escape(label)
        );
    }
    for (index, entry) in entries.iter().enumerate() {
        let y = TOP + BAR * index as f64;
        let end = if entry.values.is_finite() {
            x(entry.values)
        } else {
            names
        };
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{names:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" style=\"fill:var(--s{})\"/>\
             <text class=\"value\" x=\"{:.1}\" y=\"{:.1}\">{:.3}</text>",
            names - 8.0,
            y + 15.0,
            escape(entry.name),
            end - names,
            BAR - 8.0,
            entry.style % COLOURS,
            end + 7.0,
            y + 15.0,
            entry.values
        );
    }
    out.push_str("</svg>");
    out
}

/// A short line of style `index`, for legends.
pub fn key(index: usize) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 26 10\" aria-hidden=\"true\"><line x1=\"0\" y1=\"5\" x2=\"26\" y2=\"5\" style=\"{}\"/></svg>",
        stroke(index)
    )
}

/// Mean of each value and up to `window - 1` before it.
pub fn smooth(values: &[f64], window: usize) -> Vec<f64> {
    let mean = |i: usize| {
        let part = &values[(i + 1).saturating_sub(window.max(1))..=i];
        part.iter().sum::<f64>() / part.len() as f64
    };
    (0..values.len()).map(mean).collect()
}

fn open(height: f64, title: &str) -> String {
    let title = escape(title);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\" xmlns=\"http://www.w3.org/2000/svg\">"
    )
}

/// Round numbers that enclose a range: multiples of 1, 2 or 5 times a power of ten.
struct Grid {
    step: f64,
    /// First and last line in units of `step`.
    lines: [f64; 2],
}

impl Grid {
    fn new(low: f64, high: f64, ticks: f64) -> Self {
        let span = if high > low {
            high - low
        } else {
            low.abs().max(1.0) * 0.1
        };
        let power = 10f64.powf((span / ticks).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|m| m * power)
            .into_iter()
            .find(|step| span / step <= ticks + 1e-9)
            .unwrap_or(10.0 * power);
        let first = (low / step).floor();
        let last = (high / step).ceil().max(first + 1.0);
        Self {
            step,
            lines: [first, last],
        }
    }

    fn range(&self) -> [f64; 2] {
        self.lines.map(|line| line * self.step)
    }

    fn lines(&self) -> impl Iterator<Item = f64> {
        let [first, last] = self.lines;
        let step = self.step;
        std::iter::successors(Some(first), |line| Some(line + 1.0))
            .take_while(move |line| *line <= last)
            .map(move |line| line * step)
    }

    /// Decimals that tell two lines apart.
    fn decimals(&self) -> usize {
        (0..9)
            .find(|&d| self.step * 10f64.powi(d) >= 0.999)
            .map_or(0, |d| d.unsigned_abs() as usize)
    }
}

/// The first step, and round steps up to the last.
fn step_labels(steps: usize) -> Vec<usize> {
    let grid = Grid::new(0.0, steps as f64, 8.0);
    let round = grid.lines().map(|step| step.round());
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of steps"
    )]
    let mut labels: Vec<usize> = round
        .map(|step| step as usize)
        .filter(|s| (1..=steps).contains(s))
        .collect();
    labels.dedup();
    if labels.first().is_none_or(|&first| first > 1) {
        labels.insert(0, 1);
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, values: Vec<f64>) -> Series<'_, Vec<f64>> {
        Series {
            name,
            style: 0,
            values,
        }
    }

    #[test]
    fn charts_survive_odd_input() {
        for empty in [vec![], vec![series("a", vec![f64::NAN])]] {
            let drawn = curves("t", "u", &empty);
            assert!(
                drawn.starts_with("<svg ") && drawn.ends_with(">t: no finite values</text></svg>")
            );
        }
        for values in [
            vec![2.0],
            vec![0.0; 3],
            vec![1e-12, 5e30],
            vec![-3.0, f64::INFINITY, 2.0],
        ] {
            let one = curves("t", "u", &[series("a<b", values)]);
            assert!(
                one.contains("a&lt;b") && !one.contains("NaN") && !one.contains("inf"),
                "{one}"
            );
        }
        let bar = |values| {
            [Series {
                name: "a",
                style: 9,
                values,
            }]
        };
        assert!(!bars("t", &bar(0.0), None).contains("NaN"));
        assert!(bars("t", &bar(f64::NAN), Some(("m", 1.0))).contains("width=\"0.0\""));
    }

    #[test]
    fn grids_are_round_and_enclose() {
        for (low, high, step, decimals) in [
            (2.31, 5.52, 1.0, 0),
            (-0.4, 1.3, 0.5, 1),
            (0.0, 0.011, 0.002, 3),
            (3.0, 3.0, 0.05, 2),
        ] {
            let grid = Grid::new(low, high, 6.0);
            let [bottom, top] = grid.range();
            assert!(bottom <= low && top >= high && top > bottom);
            assert!(
                (grid.step - step).abs() < 1e-12,
                "{} for {low}..{high}",
                grid.step
            );
            assert_eq!(grid.decimals(), decimals, "{low}..{high}");
        }
        assert_eq!(step_labels(200), [1, 50, 100, 150, 200]);
        assert_eq!(step_labels(3), [1, 2, 3]);
        assert_eq!(step_labels(1), [1]);
    }

    #[test]
    fn smoothing_averages_what_came_before() {
        assert_eq!(smooth(&[4.0, 2.0, 0.0], 2), [4.0, 3.0, 1.0]);
    }
}
