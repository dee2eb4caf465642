//! What a rank brings to a collective, and how differing calls are described.

use lowp_kernels::Backend;

use super::GradWire;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    AllGather,
    ReduceScatter(GradWire),
    AllReduceMax,
    AllReduceSum,
    AllReduceSumF64,
    Agree,
    Barrier,
    Split,
}

impl Op {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Op::AllGather => "all_gather",
            Op::ReduceScatter(GradWire::F32) => "reduce_scatter (f32 wire)",
            Op::ReduceScatter(GradWire::Bf16) => "reduce_scatter (bf16 wire)",
            Op::AllReduceMax => "all_reduce_max",
            Op::AllReduceSum => "all_reduce_sum",
            Op::AllReduceSumF64 => "all_reduce_sum_f64",
            Op::Agree => "agree",
            Op::Barrier => "barrier",
            Op::Split => "split",
        }
    }
}

/// What a rank brings to a collective.
#[derive(Debug)]
pub(super) enum Payload<B: Backend> {
    Nothing,
    Bytes(Vec<B::Buffer<u8>>),
    Floats(Vec<B::Buffer<f32>>),
    Doubles(Vec<f64>),
    Text { what: String, description: String },
    Split { color: usize, key: usize },
}

impl<B: Backend> Payload<B> {
    /// Whether other ranks read memory of the device.
    pub(super) fn has_buffers(&self) -> bool {
        matches!(self, Payload::Bytes(_) | Payload::Floats(_))
    }
}

/// A rank's part in one collective. Ranks must have equal `op` and `lengths`.
#[derive(Debug)]
pub(super) struct Post<B: Backend> {
    pub(super) op: Op,
    /// Lengths of all pieces, item by item.
    pub(super) lengths: Vec<usize>,
    /// Number of items.
    pub(super) items: usize,
    pub(super) payload: Payload<B>,
    /// The rank's own handle: what it brings was written by work of this one.
    pub(super) backend: B,
}

impl<B: Backend> Post<B> {
    /// The call in words; long lists are cut around `near`.
    pub(super) fn describe(&self, near: usize) -> String {
        let name = match &self.payload {
            Payload::Text { what, .. } => format!("agree on {what}"),
            _ => self.op.name().to_owned(),
        };
        if self.items == 0 {
            return name;
        }
        let from = near.saturating_sub(4).min(self.lengths.len());
        let to = (near + 5).min(self.lengths.len());
        let dots = |cut: bool| if cut { ".. " } else { "" };
        format!(
            "{name} of {} items, {} piece lengths {}{:?}{}",
            self.items,
            self.lengths.len(),
            dots(from > 0),
            &self.lengths[from..to],
            dots(to < self.lengths.len()).trim_end(),
        )
    }
}

/// Descriptions cut to the neighbourhood of their first difference.
pub(super) fn excerpts(texts: &[&str]) -> Vec<String> {
    const BEFORE: usize = 40;
    const AFTER: usize = 160;
    let common = |text: &str| {
        let pairs = texts[0].chars().zip(text.chars());
        pairs.take_while(|(a, b)| a == b).count()
    };
    let shortest = texts.iter().map(|text| common(text)).min().unwrap_or(0);
    let from = shortest.saturating_sub(BEFORE);
    texts
        .iter()
        .map(|text| {
            let end = text.chars().count();
            let lead = if from > 0 { ".." } else { "" };
            let trail = if end > from + BEFORE + AFTER {
                ".."
            } else {
                ""
            };
            let middle: String = text.chars().skip(from).take(BEFORE + AFTER).collect();
            format!("{lead}{middle}{trail}")
        })
        .collect()
}
