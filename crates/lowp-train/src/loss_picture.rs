//! [`picture`]: the training losses of recipes over steps, and how far each is above that of the first recipe, as one SVG.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::chart::{Series, curves, escape, smooth, stroke};

/// The training losses of one recipe.
#[derive(Clone, Debug)]
pub struct RecipeLosses<'a> {
    /// What the legend calls the run.
    pub name: &'a str,
    /// The loss of each step, by seed; `None` where it is not finite.
    pub seeds: BTreeMap<u64, &'a [Option<f64>]>,
}

impl RecipeLosses<'_> {
    /// Means over the seeds that are `wanted`.
    fn mean(&self, wanted: impl Fn(&u64) -> bool) -> Vec<f64> {
        let seeds = self.seeds.iter().filter(|(seed, _)| wanted(seed));
        let seeds: Vec<_> = seeds.map(|(_, losses)| losses).collect();
        let steps = seeds.iter().map(|losses| losses.len()).max();
        let at = |step: usize| {
            let losses = seeds.iter().filter_map(|losses| losses.get(step));
            let (mut sum, mut count) = (0.0, 0);
            for loss in losses {
                (sum, count) = (sum + loss.unwrap_or(f64::NAN), count + 1);
            }
            sum / f64::from(count)
        };
        (0..steps.unwrap_or(0)).map(at).collect()
    }

    /// How far its loss is above that of `baseline`, in percent over steps, of the seeds that both have.
    fn gap(&self, baseline: &Self, window: usize) -> Vec<f64> {
        let both = |of: &Self| {
            let common =
                |seed: &u64| self.seeds.contains_key(seed) && baseline.seeds.contains_key(seed);
            smooth(&of.mean(common), window)
        };
        let percent = |(loss, base): (f64, f64)| (loss / base - 1.0) * 100.0;
        both(self)
            .into_iter()
            .zip(both(baseline))
            .map(percent)
            .collect()
    }
}

/// What the colours of charts are, on light and on dark pages, and a background of its own.
const STYLE: &str = "svg{--s0:#3c4149;--s1:#0b6fb8;--s2:#c8501e;--s3:#2a8a4a;--s4:#8a4fb0;--s5:#a07c00;--s6:#c2397a;--s7:#008a8a}\
 text{font:13px system-ui,sans-serif;fill:#5d646e}polyline{fill:none;stroke-width:1.4;stroke-linejoin:round}\
 .grid,.tick{stroke:#e2e5e9}.zero{stroke:#9aa1ab}.key{stroke-width:3}";

/// Rows of a chart, and of the legend.
const CHART: usize = 350;
const LEGEND_ROW: usize = 18;

/// The picture of `recipes`, the first of which is the baseline of gaps, if there are others; losses are in `unit`.
pub fn picture(recipes: &[RecipeLosses<'_>], unit: &str) -> String {
    let steps = recipes
        .first()
        .map_or(0, |baseline| baseline.mean(|_| true).len());
    let window = |part: usize| (steps / part).max(1);
    let (mut losses, mut gaps) = (Vec::new(), Vec::new());
    for (style, recipe) in recipes.iter().enumerate() {
        let name = recipe.name;
        let line = |values| Series {
            name,
            style,
            values,
        };
        losses.push(line(smooth(&recipe.mean(|_| true), window(50))));
        if style > 0 {
            gaps.push(line(recipe.gap(&recipes[0], window(20))));
        }
    }
    let baseline = recipes.first().map_or("", |baseline| baseline.name);
    let mut charts = vec![curves("Training loss", unit, &losses)];
    if !gaps.is_empty() {
        let unit = format!("% above {baseline}");
        charts.push(curves("Gap of the training loss", &unit, &gaps));
    }
    let (rows, legend) = (recipes.len().div_ceil(4), charts.len() * CHART);
    let height = legend + rows * LEGEND_ROW + 10;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 {height}\"><style>{STYLE}</style>\
         <rect width=\"760\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (index, chart) in charts.iter().enumerate() {
        let place = format!("<svg y=\"{}\" width=\"760\" height=\"340\" ", index * CHART);
        let _ = writeln!(out, "{}", chart.replacen("<svg ", &place, 1));
    }
    for (index, RecipeLosses { name, .. }) in recipes.iter().enumerate() {
        let (x, y) = (56 + index % 4 * 176, legend + 12 + index / 4 * LEGEND_ROW);
        let _ = writeln!(
            out,
            "<line class=\"key\" x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" style=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            x + 24,
            stroke(index),
            x + 30,
            y + 4,
            escape(name)
        );
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_over_seeds_that_both_have() {
        fn of<'a>(name: &'a str, seeds: &[(u64, &'a [Option<f64>])]) -> RecipeLosses<'a> {
            let seeds = seeds.iter().copied().collect();
            RecipeLosses { name, seeds }
        }
        let [first, second] = [[Some(2.0), Some(4.0)], [Some(8.0), Some(8.0)]];
        let [shared, own] = [[Some(4.0), Some(4.0)], [Some(100.0), None]];
        let baseline = of("fp32", &[(1, &first), (2, &second)]);
        let other = of("a<b", &[(1, &shared), (3, &own)]);
        assert_eq!(baseline.mean(|_| true), [5.0, 6.0]);
        assert!(other.mean(|_| true)[1].is_nan());
        assert_eq!(other.gap(&baseline, 1), [100.0, 0.0]);
        let drawn = picture(&[baseline, other], "nats per token");
        assert!(
            drawn.contains("a&lt;b")
                && drawn.contains("% above fp32")
                && drawn.contains(">nats per token<"),
            "{drawn}"
        );
        assert!(picture(&[], "nats").contains("no finite values"));
    }
}
