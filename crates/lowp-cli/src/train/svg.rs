//! Inline SVG charts without any external asset.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;

/// One colour per run, readable on white.
const COLOURS: [&str; 8] = [
    "#444444", "#0b6fb8", "#c8501e", "#2a8a4a", "#8a4fb0", "#b08a00", "#c2397a", "#008a8a",
];

/// The colour of run number `index`.
pub(crate) fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// Text with the characters that HTML gives a meaning escaped.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Loss over steps, one line per run, smoothed over `window` steps.
pub(crate) fn loss_curves(runs: &[(&str, &[f32])], window: usize) -> String {
    const HEIGHT: f64 = 340.0;
    const BOTTOM: f64 = 34.0;
    let curves: Vec<(&str, Vec<f64>)> = runs
        .iter()
        .map(|(name, losses)| (*name, smooth(losses, window)))
        .collect();
    let all = || {
        curves
            .iter()
            .flat_map(|(_, c)| c.iter().copied())
            .filter(|v| v.is_finite())
    };
    let low = (all().fold(f64::INFINITY, f64::min) * 4.0).floor() / 4.0;
    let high = (all().fold(f64::NEG_INFINITY, f64::max) * 4.0).ceil() / 4.0;
    let steps = curves.iter().map(|(_, c)| c.len()).max().unwrap_or(0);
    if steps == 0 || !low.is_finite() || !high.is_finite() {
        return "<p>No finite losses.</p>".to_owned();
    }
    let span = (high - low).max(0.25);
    let x = |step: f64| LEFT + step / (steps.max(2) - 1) as f64 * (WIDTH - LEFT - RIGHT);
    let y = |loss: f64| TOP + (low + span - loss) / span * (HEIGHT - TOP - BOTTOM);
    let mut out = open(HEIGHT, "Training loss over steps");
    for i in 0..=5 {
        let loss = low + span * f64::from(i) / 5.0;
        let step = (steps - 1) as f64 * f64::from(i) / 5.0;
        let (gx, gy, right, base) = (x(step), y(loss), WIDTH - RIGHT, HEIGHT - BOTTOM);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{gy:.1}\" x2=\"{right}\" y2=\"{gy:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{loss:.2}</text>\
             <text x=\"{gx:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.0}</text>",
            LEFT - 8.0,
            gy + 4.0,
            base + 18.0,
            step + 1.0
        );
    }
    for (index, (name, curve)) in curves.iter().enumerate() {
        let mut points = String::new();
        for (step, &loss) in curve.iter().enumerate().filter(|(_, v)| v.is_finite()) {
            let _ = write!(points, "{:.1},{:.1} ", x(step as f64), y(loss));
        }
        let stroke = colour(index);
        let _ = write!(
            out,
            "<polyline fill=\"none\" stroke=\"{stroke}\" stroke-width=\"1.6\" points=\"{}\">\
             <title>{}</title></polyline>",
            points.trim_end(),
            escape(name)
        );
    }
    out.push_str("</svg>");
    out
}

/// One horizontal bar per entry; the label says the value.
pub(crate) fn bars(title: &str, entries: &[(&str, f64)], unit: &str) -> String {
    const BAR: f64 = 26.0;
    const NAMES: f64 = 130.0;
    const VALUES: f64 = 110.0;
    let largest = entries
        .iter()
        .fold(f64::MIN_POSITIVE, |m, (_, v)| m.max(*v));
    let mut out = open(TOP + BAR * entries.len() as f64 + 4.0, title);
    for (index, (name, value)) in entries.iter().enumerate() {
        let y = TOP + BAR * index as f64;
        let width = value / largest * (WIDTH - NAMES - VALUES);
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{NAMES}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{value:.3} {}</text>",
            NAMES - 8.0,
            y + 14.0,
            escape(name),
            BAR - 7.0,
            colour(index),
            NAMES + width + 8.0,
            y + 14.0,
            escape(unit)
        );
    }
    out.push_str("</svg>");
    out
}

fn open(height: f64, title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" xmlns=\"http://www.w3.org/2000/svg\"><title>{}</title>",
        escape(title)
    )
}

/// Mean of each value and up to `window - 1` before it.
fn smooth(losses: &[f32], window: usize) -> Vec<f64> {
    let mean = |i: usize| {
        let part = &losses[(i + 1).saturating_sub(window.max(1))..=i];
        part.iter().map(|&v| f64::from(v)).sum::<f64>() / part.len() as f64
    };
    (0..losses.len()).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charts_survive_odd_input() {
        assert!(loss_curves(&[], 5).contains("No finite"));
        assert!(loss_curves(&[("a", &[f32::NAN])], 5).contains("No finite"));
        let one = loss_curves(&[("a<b", &[2.0])], 5);
        assert!(one.contains("a&lt;b") && !one.contains("NaN"));
        assert!(!bars("t", &[("a", 0.0)], "B").contains("NaN"));
    }

    #[test]
    fn smoothing_averages_what_came_before() {
        assert_eq!(smooth(&[4.0, 2.0, 0.0], 2), [4.0, 3.0, 1.0]);
    }
}
