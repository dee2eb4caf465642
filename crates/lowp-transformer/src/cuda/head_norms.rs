//! [`HeadNorms`]: the norms of queries and keys over the values of each head, before these are turned by their positions.

use half::bf16;
use lowp_kernels::CudaBuffer;

use super::TransformerError;
use super::attention::Rows;
use super::linear::Shared;
use super::ops::{Heads, NormParams, NormedHeads};
use crate::places::Place;

type Done<T = ()> = Result<T, TransformerError>;

/// Both norms of a block, with the turns that follow them.
#[derive(Debug)]
pub(super) struct HeadNorms {
    /// The variables that their gammas are.
    pub(super) vars: [usize; 2],
    tokens: usize,
    norms: [HeadNorm; 2],
    /// Where gradients of gamma are added up.
    sums: CudaBuffer<f32>,
}

#[derive(Debug)]
struct HeadNorm {
    heads: Heads,
    params: NormParams,
    /// What it makes.
    made: CudaBuffer<bf16>,
}

/// A norm of heads that is made.
#[derive(Debug)]
pub(super) struct NewHeadNorm {
    /// The variable that its gamma is, and the values of that.
    pub(super) var: usize,
    pub(super) gamma: CudaBuffer<f32>,
    /// What is added to the variance.
    pub(super) eps: f32,
    /// Heads that have angles.
    pub(super) heads: Heads,
    /// Where what it makes goes.
    pub(super) made: Place,
}

impl HeadNorms {
    /// The norms of queries and keys.
    pub(super) fn new(
        shared: &Shared,
        tokens: usize,
        norms: [NewHeadNorm; 2],
        sums: &Place,
    ) -> Done<Self> {
        let vars = norms.each_ref().map(|norm| norm.var);
        let norm = |new: NewHeadNorm| {
            Ok::<_, TransformerError>(HeadNorm {
                heads: new.heads,
                params: NormParams {
                    gamma: new.gamma,
                    beta: None,
                    eps: new.eps,
                },
                made: shared.arena.values(&new.made)?,
            })
        };
        let [q, k] = norms;
        Ok(Self {
            vars,
            tokens,
            norms: [norm(q)?, norm(k)?],
            sums: shared.arena.sums(sums)?,
        })
    }

    fn of<'a>(&self, norm: &'a HeadNorm) -> NormedHeads<'a> {
        NormedHeads {
            heads: &norm.heads,
            tokens: self.tokens,
            params: &norm.params,
        }
    }

    /// What attention reads of rows of queries, keys and values.
    pub(super) fn forward<'a>(
        &'a self,
        shared: &Shared,
        [q, k, v]: [Rows<'a>; 3],
    ) -> Done<[Rows<'a>; 3]> {
        for (norm, rows) in self.norms.iter().zip([q, k]) {
            shared
                .ops
                .norm_heads(self.of(norm), rows.values, &norm.made)?;
        }
        let [q, k] = self
            .norms
            .each_ref()
            .map(|norm| Rows { values: &norm.made });
        Ok([q, k, v])
    }

    /// From the gradients of what attention read to those of `rows`, in place, and those of gammas.
    pub(super) fn backward(
        &self,
        shared: &Shared,
        rows: [Rows<'_>; 3],
        gradients: [Rows<'_>; 3],
        dgammas: &[CudaBuffer<f32>; 2],
    ) -> Done {
        let each = self.norms.iter().zip(dgammas).zip(rows).zip(gradients);
        for (((norm, dgamma), rows), gradient) in each {
            shared.ops.norm_heads_backward(
                self.of(norm),
                rows.values,
                gradient.values,
                &self.sums,
                dgamma,
            )?;
        }
        Ok(())
    }
}
