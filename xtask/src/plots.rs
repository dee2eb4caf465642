//! `cargo xtask plots`: draws the bars of docs/results.toml as SVG files next to it.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::command::workspace_root;

const DATA: &str = "docs/results.toml";

#[derive(Debug, Deserialize)]
struct Data {
    plot: Vec<Plot>,
}

#[derive(Debug, Deserialize)]
struct Plot {
    /// Its name in docs/.
    file: String,
    title: String,
    group: Vec<Group>,
}

/// Bars that share a scale.
#[derive(Debug, Deserialize)]
struct Group {
    title: String,
    bars: Vec<Bar>,
}

#[derive(Debug, Deserialize)]
struct Bar {
    name: String,
    value: f64,
    /// Whether it is lowp's; others are grey.
    #[serde(default)]
    lowp: bool,
}

pub(crate) fn plots() -> Result<()> {
    let root = workspace_root()?;
    for (path, svg) in drawn(&root)? {
        fs::write(root.join(&path), svg).with_context(|| format!("cannot write {path}"))?;
        eprintln!("{path}");
    }
    Ok(())
}

/// The plots with their paths from the workspace root.
fn drawn(root: &Path) -> Result<Vec<(String, String)>> {
    let text =
        fs::read_to_string(root.join(DATA)).with_context(|| format!("cannot read {DATA}"))?;
    let data: Data = toml::from_str(&text).with_context(|| format!("{DATA} is not as expected"))?;
    let plots = data.plot.iter();
    Ok(plots
        .map(|plot| (format!("docs/{}", plot.file), svg(plot)))
        .collect())
}

const WIDTH: usize = 760;
/// Where bars begin; their names end to the left of it.
const LEFT: usize = 250;
/// The longest bar; its value stands to the right of it.
const LONGEST: f64 = 430.0;
const ROW: usize = 22;
const HEAD: usize = 36;

fn svg(plot: &Plot) -> String {
    let rows: usize = plot.group.iter().map(|group| group.bars.len() + 2).sum();
    let height = HEAD + ROW * rows;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let mut text = |x: usize, y: usize, style: &str, text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            out,
            "<text x=\"{x}\" y=\"{y}\" fill=\"#222\" {style}>{text}</text>"
        );
    };
    let mut bars = String::new();
    text(12, 24, "font-size=\"15\" font-weight=\"bold\"", &plot.title);
    let mut y = HEAD;
    for group in &plot.group {
        let most = group.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
        y += ROW;
        text(12, y, "font-weight=\"bold\"", &group.title);
        for bar in &group.bars {
            y += ROW;
            let width = bar.value / most * LONGEST;
            let colour = if bar.lowp { "#2563eb" } else { "#9ca3af" };
            text(LEFT - 8, y, "text-anchor=\"end\"", &bar.name);
            let _ = writeln!(
                bars,
                "<rect x=\"{LEFT}\" y=\"{}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>",
                y - 12,
                ROW - 6
            );
            text(LEFT + width.round() as usize + 6, y, "", &value(bar.value));
        }
        y += ROW;
    }
    out + &bars + "</svg>\n"
}

fn value(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plots_are_those_of_the_data() {
        let root = workspace_root().unwrap();
        for (path, svg) in drawn(&root).unwrap() {
            let there = fs::read_to_string(root.join(&path)).unwrap();
            assert!(there == svg, "{path} is old; run `cargo xtask plots`");
        }
    }

    #[test]
    fn the_page_has_the_numbers_and_the_plots() {
        let root = workspace_root().unwrap();
        let page = fs::read_to_string(root.join("docs/results.md")).unwrap();
        let data: Data = toml::from_str(&fs::read_to_string(root.join(DATA)).unwrap()).unwrap();
        for plot in data.plot {
            assert!(page.contains(&format!("({})", plot.file)), "{}", plot.file);
            for bar in plot.group.iter().flat_map(|group| &group.bars) {
                assert!(
                    page.contains(&value(bar.value)),
                    "{bar:?} is not in docs/results.md"
                );
            }
        }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |name: &str, value, lowp| Bar {
            name: name.into(),
            value,
            lowp,
        };
        let plot = Plot {
            file: "a.svg".into(),
            title: "A & B".into(),
            group: vec![Group {
                title: "one".into(),
                bars: vec![bar("x", 20.0, false), bar("<y>", 5.0, true)],
            }],
        };
        let svg = svg(&plot);
        for part in [
            "A &amp; B",
            "&lt;y>",
            "width=\"430.0\"",
            "width=\"107.5\"",
            ">20.0<",
            ">5.000<",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }
}
