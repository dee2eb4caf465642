//! [`Matrices`]: what a rule of matrices takes of memory, and what it sends.

use super::config::CostConfig;
use super::links::{MovedBytes, Sends};
use super::weights::Weights;
use crate::VarPlace;
use lowp_format::Recipe;
use lowp_gemm::DEVICE_WORKSPACE;
use lowp_optim::MatrixCosts;

/// Bytes of a value that travels.
const BF16: u64 = 2;

/// The matrices that are made orthogonal; nothing where the rule is none of matrices.
pub(super) struct Matrices {
    /// Bytes of each rank in which matrices are made orthogonal.
    pub(super) bytes: Vec<u128>,
    /// Bytes that the ranks of a replica send: momenta to the owners of matrices, and updates back.
    pub(super) sent: u128,
    pub(super) moved: MovedBytes,
}

impl Matrices {
    pub(super) fn new<R: Recipe>(weights: &Weights<R>, config: &CostConfig) -> Self {
        let ranks = config.mesh.shard;
        let mut matrices = Self {
            bytes: vec![0; ranks],
            sent: 0,
            moved: MovedBytes::default(),
        };
        if !config.rule.is_of_matrices() || weights.kinds.is_empty() {
            return matrices;
        }
        let cuts = weights.matrix_cuts();
        let kinds: Vec<usize> = weights.kinds_in_order().collect();
        let costs = MatrixCosts::new(&cuts, &kinds, ranks);
        let workspace = match config.vars {
            VarPlace::Host => 0,
            VarPlace::Backend => DEVICE_WORKSPACE as u128,
        };
        matrices.bytes = costs.bytes.iter().map(|bytes| bytes + workspace).collect();
        let mut owned = vec![vec![0u128; ranks]; cuts.len()];
        for (&kind, &owner) in kinds.iter().zip(&costs.owners) {
            owned[kind][owner] += 1;
        }
        let mut sends = Sends::new(ranks, config.mesh.replicate, config.per_node);
        for (kind, owned) in weights.kinds.iter().zip(&owned) {
            let pieces: Vec<u64> = kind.cost.elements.iter().map(|n| BF16 * n).collect();
            let all: u128 = pieces.iter().map(|&piece| u128::from(piece)).sum();
            let each = owned.iter().zip(&pieces);
            let sent = each.map(|(count, &own)| 2 * count * (all - u128::from(own)));
            matrices.sent += sent.sum::<u128>();
            sends.add_owned(&pieces, owned);
        }
        matrices.moved = sends.moved();
        matrices
    }
}
