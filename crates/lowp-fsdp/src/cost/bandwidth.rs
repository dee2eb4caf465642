//! [`Bandwidth`]: the time that gathers take at rates that were measured or are given.

use super::config::CostError;
use super::links::LinkBytes;
use super::weight::Gather;
use serde_json::Value;
use std::ops::RangeInclusive;

const ONE: &str = Bandwidth::GATHER;
const SCALED: &str = Bandwidth::SCALED_GATHER;
const PLAIN: &str = Bandwidth::ALL_GATHER;

/// Rates that links and memory may have, in 10^9 bytes per second.
const RATES: RangeInclusive<f64> = 1e-6..=1e9;

/// Milliseconds, or microseconds, that a gather may take.
const TIMES: RangeInclusive<f64> = 0.0..=1e6;

/// Bytes of weights whose copies take what they take in models: in smaller ones the launch is all.
const LEAST: f64 = (4u32 << 20) as f64;

/// Rates of the links within a node and between nodes, and of memory.
#[derive(Clone, Debug)]
pub struct Bandwidth {
    /// The rate of links within a node.
    pub within_node: Rate,
    /// Of links between nodes, where it is known.
    pub between_nodes: Option<Rate>,
    copy: Option<Copies>,
}

/// What copies on a rank take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copies {
    /// 10^9 bytes that one reads and writes in a second.
    gb_per_s: f64,
    /// Seconds of a copy of few bytes after others.
    least: f64,
    /// Of gathers on a GPU that has no others, where they were measured.
    alone: Option<Alone>,
}

/// What gathers take on a GPU that has no others, beside the time of their bytes.
#[derive(Clone, Copy, Debug)]
struct Alone {
    /// Seconds of one copy.
    first: f64,
    /// Seconds of each copy or transpose after it.
    another: f64,
}

/// 10^9 bytes that arrive at a rank in a second.
#[derive(Clone, Debug)]
pub struct Rate(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Given(f64),
    /// By the bytes of the whole gather, which grow; none of one GPU.
    Measured {
        source: String,
        ranks: u64,
        rates: Vec<(u64, f64)>,
        /// Seconds that a gather in two batches takes longer than one of as many bytes, where that was measured.
        another: Option<f64>,
        /// What copies take, where the same file says so.
        copy: Option<Copies>,
    },
}

impl Bandwidth {
    /// The row of a report that times the gather of one weight.
    pub const GATHER: &str = "gather of one weight";
    /// The row of a report that times the gather of one weight and its scales, which are exchanged apart.
    pub const SCALED_GATHER: &str = "gather of one weight with scales";
    /// The row of a report that times one collective of as many bytes.
    pub const ALL_GATHER: &str = "one all-gather of the same bytes";

    /// Rates within a node and between nodes, each with what copies take where its file says so.
    pub fn new(within_node: Rate, between_nodes: Option<Rate>) -> Self {
        let rates = [Some(&within_node), between_nodes.as_ref()];
        let copy = rates.into_iter().flatten().find_map(Rate::copy);
        Self {
            within_node,
            between_nodes,
            copy,
        }
    }

    /// Seconds of one gather of `bytes`, of which these arrive at a rank: both kinds of links are busy at once. The rank's own work after it
    /// takes no time where the rate of copies is not known.
    pub(crate) fn seconds(&self, rank: LinkBytes, bytes: u128, gather: &Gather) -> f64 {
        let Gather { batches, local, .. } = gather;
        let time = |rate: &Rate, arrives: u128| match arrives {
            0 => 0.0,
            arrives => {
                let others = batches.saturating_sub(1) as f64 * rate.another().unwrap_or(0.0);
                arrives as f64 / (rate.at(bytes) * 1e9) + others
            }
        };
        let between = self.between_nodes.as_ref();
        let between = between.map_or(0.0, |rate| time(rate, rank.between_nodes));
        let is_alone = rank.within_node == 0 && rank.between_nodes == 0;
        let after = self.copy.map_or(0.0, |copy| {
            let beside = match (copy.alone, local.count) {
                (_, 0) => 0.0,
                (Some(alone), count) if is_alone => {
                    alone.first + (count - 1) as f64 * alone.another
                }
                (_, count) => count as f64 * copy.least,
            };
            local.bytes as f64 / (copy.gb_per_s * 1e9) + beside
        });
        between.max(time(&self.within_node, rank.within_node)) + after
    }

    /// Where a rate is that of a GPU without others, which sends nothing.
    pub fn of_one_gpu(&self) -> Option<&str> {
        let mut rates = std::iter::once(&self.within_node).chain(&self.between_nodes);
        rates.find_map(|rate| match &rate.0 {
            Kind::Measured { source, rates, .. } if rates.is_empty() => Some(source.as_str()),
            _ => None,
        })
    }

    /// Whether copies take time.
    pub fn knows_copies(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether batches after the first of a gather take time.
    pub fn knows_batches(&self) -> bool {
        let mut rates = std::iter::once(&self.within_node).chain(&self.between_nodes);
        rates.all(|rate| rate.another().is_some())
    }

    /// What to know of the rates where the smallest and the largest gather are of these bytes, among `group` ranks of a node.
    pub fn notes(&self, [smallest, largest]: [u128; 2], group: usize) -> Vec<String> {
        let rates = [Some(&self.within_node), self.between_nodes.as_ref()];
        let others = match &self.within_node.0 {
            Kind::Measured { source, ranks, .. } if *ranks != group as u64 => Some(format!(
                "gathers are among {group} ranks of a node, and {source} measured {ranks}: rates of other numbers of ranks are others"
            )),
            _ => None,
        };
        let note = |rate: &Rate| {
            let Kind::Measured { source, rates, .. } = &rate.0 else {
                return None;
            };
            let ((first, _), (last, _)) = (rates.first()?, rates.last()?);
            let outside = smallest < u128::from(*first) || largest > u128::from(*last);
            outside.then(|| {
                format!(
                    "gathers are of {smallest} to {largest} bytes, and {source} measured {first} to {last}: outside of \
                     them the rate of the nearest size is taken, which is too high for smaller gathers and too low for larger ones"
                )
            })
        };
        let outside = rates.into_iter().flatten().filter_map(note);
        others.into_iter().chain(outside).collect()
    }
}

impl Copies {
    /// Those of a report; `None` where it has none.
    fn measured(file: &str, report: &Value) -> Result<Option<Self>, CostError> {
        let number = |key: &str, range: RangeInclusive<f64>| match &report[key] {
            Value::Null => Ok(None),
            value => {
                let number = value.as_f64().filter(|number| range.contains(number));
                let error = || {
                    report_error(
                        file,
                        format!(
                            "has {key} {value}, which is no number from {} to {}",
                            range.start(),
                            range.end()
                        ),
                    )
                };
                number.map(Some).ok_or_else(error)
            }
        };
        let least = number("small_copy_microseconds", TIMES)?.unwrap_or(0.0) / 1e6;
        let Some(gb_per_s) = number("copy_gb_per_s", RATES)? else {
            return Ok(None);
        };
        let mut copies = Self {
            gb_per_s,
            least,
            alone: None,
        };
        if report["ranks"] == 1 {
            copies.alone = copies.alone(file, report)?;
        }
        Ok(Some(copies))
    }

    /// What gathers of single weights on one GPU take beside the time of their bytes.
    fn alone(&self, file: &str, report: &Value) -> Result<Option<Alone>, CostError> {
        let beside = |operation| {
            let copied = |bytes: f64| 2.0 * bytes / (self.gb_per_s * 1e9);
            longer(file, report, operation, LEAST, copied)
        };
        let (first, two) = (beside(ONE)?, beside(SCALED)?);
        let alone = |first| Alone {
            first,
            another: two.map_or(self.least, |two| (two - first).max(0.0)),
        };
        Ok(first.map(alone))
    }
}

/// A report whose rates cannot be taken.
fn report_error(file: &str, what: impl Into<String>) -> CostError {
    CostError::Report {
        file: file.to_owned(),
        what: what.into(),
    }
}

/// Seconds that an operation on `least` bytes or more takes longer than `expected` for its bytes: the median of the rows of a report, `None`
/// where it has none.
fn longer(
    file: &str,
    report: &Value,
    operation: &str,
    least: f64,
    expected: impl Fn(f64) -> f64,
) -> Result<Option<f64>, CostError> {
    let rows = report["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let mut all = Vec::new();
    for row in rows.iter().filter(|row| row["operation"] == operation) {
        let time = row["milliseconds"].as_f64();
        let (Some(bytes), Some(time)) = (row["bytes"].as_u64(), time.filter(|t| TIMES.contains(t)))
        else {
            return Err(report_error(
                file,
                format!(
                    "has a row '{operation}' whose bytes are none, or whose milliseconds are no number from {} to {}",
                    TIMES.start(),
                    TIMES.end()
                ),
            ));
        };
        if bytes as f64 >= least {
            all.push((time / 1e3 - expected(bytes as f64)).max(0.0));
        }
    }
    all.sort_by(f64::total_cmp);
    Ok(all.get(all.len() / 2).copied())
}

impl Rate {
    /// A rate of so many 10^9 bytes per second.
    ///
    /// # Errors
    /// No such rate.
    pub fn given(rate: f64) -> Result<Self, CostError> {
        match RATES.contains(&rate) {
            true => Ok(Self(Kind::Given(rate))),
            false => Err(CostError::Rate {
                rate,
                least: *RATES.start(),
                most: *RATES.end(),
            }),
        }
    }

    fn copy(&self) -> Option<Copies> {
        match &self.0 {
            Kind::Given(_) => None,
            Kind::Measured { copy, .. } => *copy,
        }
    }

    /// The gathers of single weights in the JSON that `lowp bench --ranks` wrote to `file`, or the plain all-gathers of one that has none.
    ///
    /// # Errors
    /// Another file.
    pub fn of_report(file: &str, report: &Value) -> Result<Self, CostError> {
        let mut rate = Self::measured(file, report)?;
        if let Kind::Measured { copy, .. } = &mut rate.0 {
            *copy = Copies::measured(file, report)?;
        }
        Ok(rate)
    }

    fn measured(file: &str, report: &Value) -> Result<Self, CostError> {
        let error = |what: &str| report_error(file, what);
        let (Some(ranks @ 1..), Some(rows)) = (report["ranks"].as_u64(), report["rows"].as_array())
        else {
            return Err(error("is no report of ranks"));
        };
        let device = report["device"].as_str().unwrap_or("an unnamed device");
        let source = format!("{file} ({ranks} x {device})");
        if ranks == 1 {
            if !rows.iter().any(|row| row["operation"] == ONE) {
                return Err(error(&format!("has no row '{ONE}'")));
            }
            let (rates, another) = (Vec::new(), None);
            return Ok(Self(Kind::Measured {
                source,
                ranks,
                rates,
                another,
                copy: None,
            }));
        }
        let mut found: Vec<(u64, f64)> = Vec::new();
        let is = |row: &Value, operation: &str| row["operation"] == operation;
        let one = rows.iter().any(|row| is(row, ONE));
        let operation = if one { ONE } else { PLAIN };
        for row in rows.iter().filter(|row| is(row, operation)) {
            let (bytes, rate) = (row["bytes"].as_u64(), row["gb_per_s"].as_f64());
            match (bytes, rate) {
                (Some(bytes), Some(rate)) if bytes > 0 && RATES.contains(&rate) => {
                    found.push((bytes, rate));
                }
                _ => {
                    return Err(error(&format!(
                        "has a row '{operation}' whose bytes are none, or whose gb_per_s is no number from {} to {}",
                        RATES.start(),
                        RATES.end()
                    )));
                }
            }
        }
        if found.is_empty() {
            return Err(error(&format!("has no row '{ONE}' or '{PLAIN}'")));
        }
        found.sort_by_key(|(bytes, _)| *bytes);
        let mean = |same: &[(u64, f64)]| {
            let sum: f64 = same.iter().map(|(_, rate)| rate).sum();
            (same[0].0, sum / same.len() as f64)
        };
        let mut rates: Vec<(u64, f64)> = found.chunk_by(|a, b| a.0 == b.0).map(mean).collect();
        // Fewer bytes take no more time, whatever one of the measurements met.
        let mut most = f64::INFINITY;
        for (bytes, rate) in rates.iter_mut().rev() {
            most = most.min(*bytes as f64 / *rate);
            *rate = *bytes as f64 / most;
        }
        let mut measured = Self(Kind::Measured {
            source,
            ranks,
            rates,
            another: None,
            copy: None,
        });
        let arrives = |bytes: f64| bytes - bytes / ranks as f64;
        let one = |bytes: f64| arrives(bytes) / (measured.at(bytes as u128) * 1e9);
        let longer = longer(file, report, SCALED, 0.0, one)?;
        if let Kind::Measured { another, .. } = &mut measured.0 {
            *another = longer;
        }
        Ok(measured)
    }

    /// The rate of a gather of `bytes`: between two sizes that were measured so that the time is in proportion to the size, outside of
    /// them that of the nearest.
    fn at(&self, bytes: u128) -> f64 {
        let rates = match &self.0 {
            Kind::Given(rate) => return *rate,
            Kind::Measured { rates, .. } => rates,
        };
        let above = rates.partition_point(|(size, _)| u128::from(*size) < bytes);
        match (rates.get(above.wrapping_sub(1)), rates.get(above)) {
            (Some((_, rate)), None) | (None, Some((_, rate))) => *rate,
            (Some((small, low)), Some((large, high))) => {
                let [bytes, small, large] = [bytes as f64, *small as f64, *large as f64];
                let part = (bytes - small) / (large - small);
                let time = small / low + part * (large / high - small / low);
                bytes / time
            }
            (None, None) => f64::INFINITY,
        }
    }

    /// Seconds of each batch after the first of the same gather.
    fn another(&self) -> Option<f64> {
        match &self.0 {
            Kind::Given(_) => None,
            Kind::Measured { another, .. } => *another,
        }
    }

    /// Where the rate comes from.
    pub fn source(&self) -> String {
        match &self.0 {
            Kind::Given(rate) => format!("{rate} GB/s"),
            Kind::Measured { source, .. } => source.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::weight::{Local, Use};
    use super::*;
    use serde_json::json;

    /// A gather in `batches`, and `count` copies of `bytes` read and written beside.
    fn gather(batches: usize, bytes: u64, count: u64) -> Gather {
        Gather {
            of: Use::Forward,
            pieces: Vec::new(),
            batches,
            local: Local { bytes, count },
        }
    }

    /// The rates of `report` within a node.
    fn read(report: &Value) -> Result<Bandwidth, CostError> {
        Ok(Bandwidth::new(Rate::of_report("a file", report)?, None))
    }

    fn report(rates: &[(u64, f64)]) -> Value {
        let row = |(bytes, rate): &(u64, f64)| json!({"operation": PLAIN, "bytes": bytes, "gb_per_s": rate});
        let mut rows: Vec<Value> = rates.iter().map(row).collect();
        rows.push(json!({"operation": "gather of all weights", "bytes": 5, "gb_per_s": 1.0}));
        json!({"device": "a device", "ranks": 2, "rows": rows})
    }

    #[test]
    fn rates_follow_the_size_and_stop_at_the_ends() {
        let report = report(&[(4000, 300.0), (1000, 100.0), (1000, 200.0)]);
        let rate = Rate::of_report("a file", &report).expect("rates");
        for (bytes, expected) in [
            (1, 150.0),
            (1000, 150.0),
            (2000, 225.0),
            (4000, 300.0),
            (1 << 40, 300.0),
        ] {
            assert!((rate.at(bytes) - expected).abs() < 1e-9, "{bytes}");
        }
        let bandwidth = Bandwidth::new(rate, None);
        assert_eq!(bandwidth.notes([1000, 4000], 2), [""; 0]);
        let notes = bandwidth.notes([999, 4000], 2);
        assert!(notes[0].contains("measured 1000 to 4000"), "{notes:?}");
        let notes = bandwidth.notes([1000, 4000], 3);
        assert!(notes[0].contains("among 3 ranks of a node"), "{notes:?}");
    }

    /// A measurement that met something else makes no gather slower than larger ones.
    #[test]
    fn more_bytes_take_no_less_time() {
        let rate = Rate::of_report(
            "a file",
            &report(&[(1000, 100.0), (2000, 10.0), (4000, 100.0)]),
        );
        let rate = rate.expect("rates");
        let time = |bytes: u128| bytes as f64 / rate.at(bytes);
        let times: Vec<f64> = (1..50).map(|n| time(100 * n)).collect();
        assert!(times.is_sorted(), "{times:?}");
        assert!((time(2000) - 40.0).abs() < 1e-9, "{}", time(2000));
    }

    /// Gathers of single weights count where they were measured, and copies with them.
    #[test]
    fn gathers_of_single_weights_and_copies() -> Result<(), Box<dyn std::error::Error>> {
        let mut report = report(&[(1000, 100.0)]);
        let rows = report["rows"].as_array_mut().ok_or("rows")?;
        rows.push(json!({"operation": ONE, "bytes": 1000, "gb_per_s": 50.0}));
        report["copy_gb_per_s"] = json!(4000.0);
        report["small_copy_microseconds"] = json!(10.0 / 3.0);
        let bandwidth = read(&report)?;
        let links = LinkBytes {
            within_node: 50_000_000_000,
            between_nodes: 0,
        };
        let seconds = bandwidth.seconds(links, 1000, &gather(2, 2_000_000_000_000, 3));
        assert!((seconds - 1.50001).abs() < 1e-9, "{seconds}");
        Ok(())
    }

    /// Large and small pieces are batches of their own, and the second takes what it was measured to.
    #[test]
    fn another_batch_takes_longer() -> Result<(), Box<dyn std::error::Error>> {
        // Half of 8 * 10^6 bytes arrive, at 40 GB/s: 100 us.
        let one = json!({"operation": ONE, "bytes": 8_000_000, "gb_per_s": 40.0});
        let scaled = |bytes: u64, us: f64| json!({"operation": SCALED, "bytes": bytes, "milliseconds": us / 1e3});
        let rows = [
            one,
            scaled(8_000_000, 109.0),
            scaled(8_000_000, 107.0),
            scaled(8_000_000, 90.0),
        ];
        let report = json!({"device": "a device", "ranks": 2, "rows": rows});
        let bandwidth = read(&report)?;
        let links = LinkBytes {
            within_node: 4_000_000,
            between_nodes: 0,
        };
        for (batches, us) in [(1, 100.0), (2, 107.0)] {
            let seconds = bandwidth.seconds(links, 8_000_000, &gather(batches, 0, 0));
            assert!((seconds * 1e6 - us).abs() < 1e-6, "{batches}: {seconds}");
        }
        Ok(())
    }

    /// A report of one GPU has what gathers take there, and no rate of links.
    #[test]
    fn one_gpu_has_copies_alone() -> Result<(), Box<dyn std::error::Error>> {
        // 2 * 40 * 10^6 bytes at 10^12 in a second are 80 us: 4, 5 and 6 us beside.
        let of = |operation: &str, bytes: u64, us: f64| json!({"operation": operation, "bytes": bytes, "gb_per_s": 0.0, "milliseconds": us / 1e3});
        let row = |bytes: u64, us: f64| of(ONE, bytes, us);
        let mut report = json!({
            "device": "a device", "ranks": 1, "copy_gb_per_s": 1000.0, "small_copy_microseconds": 1.0,
            "rows": [row(40_000_000, 86.0), row(1_000_000, 70.0), row(40_000_000, 84.0), row(40_000_000, 85.0)],
        });
        let bandwidth = read(&report)?;
        let source = bandwidth.of_one_gpu().ok_or("rates of links")?;
        assert!(source.ends_with("(1 x a device)"), "{source}");
        // Bytes take 3 us, the first copy 5, and another what a small one takes, or what was measured.
        let seconds = bandwidth.seconds(LinkBytes::default(), 1, &gather(1, 3_000_000, 2));
        assert!((seconds - 9e-6).abs() < 1e-12, "{seconds}");
        let rows = report["rows"].as_array_mut().ok_or("rows")?;
        rows.push(of(SCALED, 40_000_000, 88.5));
        let seconds = read(&report)?.seconds(LinkBytes::default(), 1, &gather(1, 3_000_000, 3));
        assert!((seconds - 15e-6).abs() < 1e-12, "{seconds}");
        let given = Bandwidth::new(Rate::given(100.0).expect("a rate"), None);
        assert_eq!(given.of_one_gpu(), None);
        Ok(())
    }

    /// The slower kind of link decides.
    #[test]
    fn time_is_that_of_the_slower_links() {
        let bandwidth = {
            let [within, between] = [200.0, 50.0].map(|rate| Rate::given(rate).expect("a rate"));
            Bandwidth::new(within, Some(between))
        };
        let links = |within_node, between_nodes| LinkBytes {
            within_node,
            between_nodes,
        };
        let seconds = |links| bandwidth.seconds(links, 1, &gather(2, 9, 1));
        assert_eq!(seconds(links(400_000_000_000, 0)), 2.0);
        assert_eq!(seconds(links(400_000_000_000, 50_000_000_000)), 2.0);
        assert_eq!(seconds(links(0, 200_000_000_000)), 4.0);
    }
}
