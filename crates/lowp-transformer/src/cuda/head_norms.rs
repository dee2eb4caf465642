//! [`HeadNorms`]: the norms of queries and keys over the values of each head, before these are turned by their positions.

use half::bf16;
use lowp_kernels::CudaBuffer;

use super::TransformerError;
use super::attention::Rows;
use super::linear::Shared;
use super::ops::{Heads, NormParams};
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

impl HeadNorms {
    /// The norms with gammas that are the variables `vars`, of heads that have angles.
    pub(super) fn new(
        shared: &Shared,
        (vars, gammas, eps): ([usize; 2], [CudaBuffer<f32>; 2], f32),
        (heads, tokens): ([Heads; 2], usize),
        (made, sums): ([Place; 2], &Place),
    ) -> Done<Self> {
        let norm = |gamma, heads, made: &Place| {
            let beta = None;
            Ok::<_, TransformerError>(HeadNorm {
                heads,
                params: NormParams { gamma, beta, eps },
                made: shared.arena.values(made)?,
            })
        };
        let ([q, k], [of_q, of_k]) = (heads, gammas);
        Ok(Self {
            vars,
            tokens,
            norms: [norm(of_q, q, &made[0])?, norm(of_k, k, &made[1])?],
            sums: shared.arena.sums(sums)?,
        })
    }

    /// What attention reads of rows of queries, keys and values.
    pub(super) fn forward<'a>(
        &'a self,
        shared: &Shared,
        [q, k, v]: [Rows<'a>; 3],
    ) -> Done<[Rows<'a>; 3]> {
        for (norm, rows) in self.norms.iter().zip([q, k]) {
            let of = (&norm.heads, self.tokens);
            shared
                .ops
                .norm_heads(of, &norm.params, rows.values, &norm.made)?;
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
                (&norm.heads, self.tokens),
                &norm.params,
                (rows.values, gradient.values),
                (&self.sums, dgamma),
            )?;
        }
        Ok(())
    }
}
