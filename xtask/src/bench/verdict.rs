//! Whether benchmarks reach their bars. Times move by a tenth from run to run, so the median of three
//! runs decides; a row that reaches its bar at once is not run again.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};

use super::measured::Group;

/// Runs of a row that was below its bar.
const RUNS: usize = 3;

/// A bar, and the ratios of the runs.
#[derive(Debug, PartialEq)]
pub(super) struct Verdict {
    bar: f64,
    /// At least one.
    ratios: Vec<f64>,
}

impl Verdict {
    /// The ratio that decides.
    pub(super) fn median(&self) -> f64 {
        median(self.ratios.clone())
    }

    fn missed(&self) -> bool {
        // A ratio that is no number misses, too.
        self.median().is_nan() || self.median() < self.bar
    }
}

/// The bar; if it is missed, with the ratios of all runs.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bar)?;
        if self.missed() {
            let ratios = self.ratios.iter().map(|x| format!("{x:.2}"));
            write!(f, ", missed in {}", ratios.collect::<Vec<_>>().join(" "))?;
        }
        Ok(())
    }
}

/// The middle one of sorted values; of an even number, the upper one.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Judges the rows of `groups` that have a bar; `measure` runs those that are below theirs once
/// more.
pub(super) fn judge(
    groups: &BTreeMap<String, Group>,
    bars: &BTreeMap<String, f64>,
    mut measure: impl FnMut(&[&str]) -> Result<BTreeMap<String, Group>>,
) -> Result<BTreeMap<String, Verdict>> {
    let mut verdicts = BTreeMap::new();
    for (name, group) in groups {
        if let (Some(&bar), Some(ratio)) = (bars.get(name), group.ratio()) {
            let ratios = vec![ratio];
            verdicts.insert(name.clone(), Verdict { bar, ratios });
        }
    }
    let missed: Vec<String> = verdicts
        .iter()
        .filter(|(_, verdict)| verdict.missed())
        .map(|(name, _)| name.clone())
        .collect();
    if missed.is_empty() {
        return Ok(verdicts);
    }
    let names: Vec<&str> = missed.iter().map(String::as_str).collect();
    for _ in 1..RUNS {
        let groups = measure(&names)?;
        for name in &missed {
            let ratio = groups.get(name).and_then(Group::ratio);
            let Some(ratio) = ratio else {
                bail!("`{name}` missed its bar and gave no ratio when it ran again");
            };
            if let Some(verdict) = verdicts.get_mut(name) {
                verdict.ratios.push(ratio);
            }
        }
    }
    Ok(verdicts)
}

/// An error that names every bar that is missed.
pub(super) fn result(verdicts: &BTreeMap<String, Verdict>) -> Result<()> {
    let missed: Vec<String> = verdicts
        .iter()
        .filter(|(_, verdict)| verdict.missed())
        .map(|(name, verdict)| format!("{name}: {:.2}, bar {verdict}", verdict.median()))
        .collect();
    if !missed.is_empty() {
        bail!(
            "{} below the bar in the median of {RUNS} runs. {}",
            missed.len(),
            missed.join("; ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(ratios: &[(&str, f64)]) -> BTreeMap<String, Group> {
        let group = |ratio: f64| Group {
            bytes: 1.0,
            seconds: [("memcpy", 1.0), ("1 thread", 1.0 / ratio)]
                .map(|(name, seconds)| (name.to_owned(), seconds))
                .into_iter()
                .collect(),
        };
        let named = |&(name, ratio): &(&str, f64)| (name.to_owned(), group(ratio));
        ratios.iter().map(named).collect()
    }

    /// What `judge` says of row `a`, with bar 0.5, for the ratios of its runs.
    fn judged(runs: [f64; 3]) -> (BTreeMap<String, Verdict>, usize) {
        let bars = [("a", 0.5), ("b", 0.5), ("not run", 9.0)]
            .map(|(name, bar)| (name.to_owned(), bar))
            .into_iter()
            .collect();
        let first = groups(&[("a", runs[0]), ("b", 0.75), ("no bar", 0.1)]);
        let mut reruns = 0;
        let verdicts = judge(&first, &bars, |missed| {
            assert_eq!(missed, ["a"]);
            reruns += 1;
            Ok(groups(&[("a", runs[reruns])]))
        });
        (verdicts.expect("verdicts"), reruns)
    }

    #[test]
    fn the_median_of_three_runs_decides() {
        for (runs, reruns, passes) in [
            ([0.5, 0.0, 0.0], 0, true),
            ([0.25, 0.5, 0.75], 2, true),
            ([0.25, 0.75, 0.5], 2, true),
            ([0.25, 0.75, 0.25], 2, false),
            ([0.25, 0.25, 0.75], 2, false),
            ([f64::NAN, f64::NAN, 0.75], 2, false),
        ] {
            let (verdicts, counted) = judged(runs);
            assert_eq!(counted, reruns, "{runs:?}");
            assert_eq!(result(&verdicts).is_ok(), passes, "{runs:?}");
            assert_eq!(verdicts.keys().collect::<Vec<_>>(), ["a", "b"]);
        }
    }

    #[test]
    fn a_missed_bar_is_named_with_its_runs() {
        let (verdicts, _) = judged([0.25, 0.125, 0.75]);
        let error = result(&verdicts).expect_err("a missed bar");
        assert_eq!(
            error.to_string(),
            "1 below the bar in the median of 3 runs. a: 0.25, bar 0.5, missed in 0.25 0.12 0.75"
        );
    }

    #[test]
    fn a_row_that_does_not_run_again_is_an_error() {
        let bars = BTreeMap::from([("a".to_owned(), 0.5)]);
        let verdicts = judge(&groups(&[("a", 0.25)]), &bars, |_| Ok(BTreeMap::new()));
        assert!(verdicts.is_err());
    }
}
