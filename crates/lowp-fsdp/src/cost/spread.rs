//! [`RankSpread`]: how evenly linear layers lie on the ranks of a replica, and how evenly these send them.

use super::block::BlockCost;
use super::config::CostConfig;
use super::traffic::{CollectiveName, USES};
use super::weight::WeightCost;
use super::weights::Weights;
use lowp_format::Recipe;
use serde::{Serialize, Serializer};

/// The least, the mean and the most of a number that each rank has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Spread {
    /// The least of the ranks.
    pub min: u128,
    /// The mean over the ranks, rounded down.
    pub mean: u128,
    /// The most of the ranks.
    pub max: u128,
}

impl Spread {
    fn of(ranks: &[u64]) -> Self {
        let all = ranks.iter().map(|&n| u128::from(n));
        let count = ranks.len().max(1) as u128;
        Self {
            min: all.clone().min().unwrap_or(0),
            mean: all.clone().sum::<u128>() / count,
            max: all.max().unwrap_or(0),
        }
    }

    /// The most over the mean, 1 where there is nothing.
    pub fn ratio(&self) -> f64 {
        match self.mean {
            0 if self.max == 0 => 1.0,
            mean => self.max as f64 / mean as f64,
        }
    }
}

/// How evenly ranks have and send the linear layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankSpread {
    /// Bytes of masters, in their dtype.
    pub masters: Spread,
    /// What they are.
    #[serde(skip)]
    masters_are: &'static str,
    /// Bytes of the states of the rule.
    pub states: Spread,
    /// What they are.
    #[serde(skip)]
    states_are: &'static str,
    /// Bytes of codes as they are stored.
    pub codes: Spread,
    /// Bytes of the scales beside the codes.
    pub scales: Spread,
    /// Bytes of masters, states, codes and scales.
    pub total: Spread,
    /// Bytes that each rank sends of the block whose ranks differ most, by what it is gathered for.
    #[serde(rename = "sent_of_a_block", serialize_with = "by_key")]
    pub sent: Vec<SentSpread>,
}

/// Bytes that ranks send of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSpread {
    /// What the block is gathered for, as JSON names it: `forward`, for example.
    pub key: &'static str,
    /// The same in words.
    pub what: &'static str,
    /// The bytes.
    pub bytes: Spread,
}

fn by_key<S: Serializer>(sent: &[SentSpread], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(sent.iter().map(|sent| (sent.key, sent.bytes)))
}

impl RankSpread {
    pub(super) fn new<R: Recipe>(weights: &Weights<R>, config: &CostConfig) -> Self {
        let ranks = config.mesh.shard;
        let by_rank = |of: fn(&WeightCost) -> &[u64]| weights.by_rank(ranks, of);
        let masters = by_rank(|cost| &cost.masters);
        let [stored, scales] = [by_rank(|cost| &cost.stored), by_rank(|cost| &cost.scales)];
        let zip = |a: &[u64], b: &[u64], f: &dyn Fn(u64, u64) -> u64| -> Vec<u64> {
            a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
        };
        // Blocks of states end with each weight.
        let states = |rank| weights.sum(|cost| config.state_bytes(u128::from(cost.elements[rank])));
        let states = (0..ranks).map(|rank| u64::try_from(states(rank)).unwrap_or(u64::MAX));
        let states: Vec<u64> = states.collect();
        let kept = zip(&masters, &states, &|masters, states| masters + states);
        Self {
            masters: Spread::of(&masters),
            masters_are: weights.masters_are(config),
            states: Spread::of(&states),
            states_are: config.states(),
            codes: Spread::of(&zip(&stored, &scales, &|stored, scales| stored - scales)),
            scales: Spread::of(&scales),
            total: Spread::of(&zip(&kept, &stored, &|kept, bytes| kept + bytes)),
            sent: sent(weights),
        }
    }

    /// The parts with what they are.
    pub fn rows(&self) -> [(&'static str, Spread); 5] {
        [
            (self.masters_are, self.masters),
            (self.states_are, self.states),
            ("codes", self.codes),
            ("scales", self.scales),
            ("all of these", self.total),
        ]
    }
}

/// What ranks send of the block whose ranks differ most, by what it is gathered for. Messages are counted with their padding.
fn sent<R: Recipe>(weights: &Weights<R>) -> Vec<SentSpread> {
    let spread = |of, block: &BlockCost| {
        let mut sums: Vec<u64> = Vec::new();
        for gather in block.gathers.iter().filter(|gather| gather.of == of) {
            sums.resize(sums.len().max(gather.pieces.len()), 0);
            for (sum, piece) in sums.iter_mut().zip(&gather.pieces) {
                *sum += piece;
            }
        }
        Spread::of(&sums)
    };
    let worst = |&(of, CollectiveName { key, what })| {
        let all = weights.costs.iter().map(|block| spread(of, block));
        let worst = all.reduce(|a, b| if b.ratio() > a.ratio() { b } else { a });
        worst.map(|bytes| SentSpread { key, what, bytes })
    };
    let found = USES.iter().filter_map(worst);
    found.filter(|sent| sent.bytes.max > 0).collect()
}
