//! Models whose weights are quantized in mxfp8: tensors of a checkpoint, and the parts of them that ranks have.

use std::collections::HashSet;

use crate::block::{Block, Dtype};
use crate::list::{Part, Table, table_of};

/// Elements that are not cut: those of one scale.
const UNIT: usize = 32;

/// How tensors are cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Each over all ranks.
    Even,
    /// All weights of a block of the network, one after the other, over all ranks: a rank has parts of a few.
    Dealt,
}

impl Cut {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Dealt => "dealt",
        }
    }
}

/// A network of a few blocks, followed by equal ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    blocks: [(usize, &'static [Weight]); 2],
    /// Vectors of each block.
    norms: &'static [usize],
    /// Vocabulary and width of the embedding and the head.
    embedding: [usize; 2],
}

/// So many weights of a name, with their rows and columns.
type Weight = (&'static str, usize, usize, usize);

pub(crate) const TINY: Model = Model {
    name: "tiny",
    blocks: [(0, &[]), (3, &[("w1", 1, 64, 96), ("w2", 2, 96, 64)])],
    norms: &[64],
    embedding: [256, 64],
};

pub(crate) const LLAMA_70B: Model = Model {
    name: "70b",
    blocks: [
        (0, &[]),
        (
            80,
            &[
                ("q_proj", 1, 8192, 8192),
                ("k_proj", 1, 1024, 8192),
                ("v_proj", 1, 1024, 8192),
                ("o_proj", 1, 8192, 8192),
                ("gate_proj", 1, 28_672, 8192),
                ("up_proj", 1, 28_672, 8192),
                ("down_proj", 1, 8192, 28_672),
            ],
        ),
    ],
    norms: &[8192, 8192],
    embedding: [128_256, 8192],
};

const LATENT: [Weight; 5] = [
    ("q_a_proj", 1, 1536, 7168),
    ("q_b_proj", 1, 24_576, 1536),
    ("kv_a_proj", 1, 576, 7168),
    ("kv_b_proj", 1, 32_768, 512),
    ("o_proj", 1, 7168, 16_384),
];

pub(crate) const DEEPSEEK_671B: Model = Model {
    name: "671b",
    blocks: [
        (
            3,
            &[
                LATENT[0],
                LATENT[1],
                LATENT[2],
                LATENT[3],
                LATENT[4],
                ("gate_proj", 1, 18_432, 7168),
                ("up_proj", 1, 18_432, 7168),
                ("down_proj", 1, 7168, 18_432),
            ],
        ),
        (
            58,
            &[
                LATENT[0],
                LATENT[1],
                LATENT[2],
                LATENT[3],
                LATENT[4],
                ("experts.gate_proj", 257, 2048, 7168),
                ("experts.up_proj", 257, 2048, 7168),
                ("experts.down_proj", 257, 7168, 2048),
            ],
        ),
    ],
    norms: &[7168, 7168, 1536, 512],
    embedding: [129_280, 7168],
};

/// A tensor of a checkpoint: one row.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) full: [usize; 2],
    /// Entries of a unit.
    each: usize,
    /// What is cut over ranks, in units, and where this begins in it.
    of: usize,
    start: usize,
    cut: Cut,
}

impl Tensor {
    /// The part of `rank`.
    pub(crate) fn of_rank(&self, rank: usize, ranks: usize) -> Option<Block> {
        let begin = |rank: usize| self.of / ranks * rank + rank.min(self.of % ranks);
        let end = self.start + self.full[1] / self.each;
        let [from, to] = [begin(rank), begin(rank + 1)].map(|at| at.clamp(self.start, end));
        let block = Block::of_row((from - self.start) * self.each, (to - from) * self.each);
        (self.cut == Cut::Even || to > from).then_some(block)
    }
}

/// What only the first rank has.
pub(crate) fn counts() -> Tensor {
    Tensor {
        name: "optimizer.counts".to_owned(),
        dtype: Dtype::U8,
        full: [1, 16],
        each: 16,
        of: 1,
        start: 0,
        cut: Cut::Even,
    }
}

impl Model {
    /// All tensors, in the order of training's pieces.
    pub(crate) fn tensors(&self, cut: Cut) -> Vec<Tensor> {
        let mut weights = Vec::new();
        let (mut vars, mut number) = (
            vec![("embedding".to_owned(), self.embedding.iter().product())],
            0,
        );
        for (blocks, of_block) in self.blocks {
            for _ in 0..blocks {
                let names = of_block.iter().flat_map(|&(name, count, rows, cols)| {
                    let name = move |at| match count {
                        1 => format!("layers.{number}.{name}"),
                        _ => format!("layers.{number}.{name}.{at}"),
                    };
                    (0..count).map(move |at| (name(at), rows * cols))
                });
                let names: Vec<_> = names.collect();
                let all: usize = names.iter().map(|(_, len)| len / UNIT).sum();
                let mut start = 0;
                for (name, len) in names {
                    let units = len / UNIT;
                    weights.push(match cut {
                        Cut::Even => (name, units, (units, 0)),
                        Cut::Dealt => (name, units, (all, start)),
                    });
                    start += units;
                }
                for (at, len) in self.norms.iter().enumerate() {
                    vars.push((format!("layers.{number}.norm{at}"), *len));
                }
                number += 1;
            }
        }
        vars.push(("head".to_owned(), self.embedding.iter().product()));
        let mut tensors = Vec::new();
        let mut add = |name: &str, what: &str, dtype, each, units: usize, (of, start), cut| {
            tensors.push(Tensor {
                name: format!("{name}.{what}"),
                dtype,
                full: [1, units * each],
                each,
                of,
                start,
                cut,
            });
        };
        for states in [&["master"][..], &["exp_avg", "exp_avg_sq"]] {
            for (name, units, place) in &weights {
                for what in states {
                    add(name, what, Dtype::F32, UNIT, *units, *place, cut);
                }
            }
            for (name, len) in &vars {
                for what in states {
                    let units = len / UNIT;
                    add(name, what, Dtype::F32, UNIT, units, (units, 0), Cut::Even);
                }
            }
        }
        for (name, units, place) in &weights {
            for orientation in ["rowwise", "columnwise"] {
                for (part, each) in [("data", UNIT), ("scale", 1)] {
                    let what = format!("{orientation}_{part}");
                    add(name, &what, Dtype::U8, each, *units, *place, cut);
                }
            }
        }
        tensors
    }
}

/// The first of each dtype and shape, in the order of the kinds of a table.
pub(crate) fn one_of_each_kind(tensors: &[Tensor], ranks: usize) -> Vec<&Tensor> {
    let mut known = HashSet::new();
    let first = tensors
        .iter()
        .filter(|tensor| known.insert((tensor.dtype, tensor.full, tensor.of_rank(1, ranks))));
    first.collect()
}

/// The list of a rank.
pub(crate) fn listed(parts: &[(Tensor, Block)]) -> (Table, Vec<Vec<Block>>) {
    table_of(parts.iter().map(|(tensor, block)| Part {
        name: &tensor.name,
        dtype: tensor.dtype,
        full: tensor.full,
        blocks: vec![*block],
    }))
}
