//! [`HeadNorms`]: the norms of queries and keys over the values of each head, before these are turned by their positions.

use half::bf16;
use lowp_format::Recipe;
use lowp_fsdp::ShardedModel;
use lowp_kernels::{Cuda, CudaBuffer};

use super::TransformerError;
use super::attention::Rows;
use super::block::{f32_gradient, var_buffer};
use super::linear::Shared;
use super::ops::{Heads, NormParams};
use crate::places::Place;

type Done<T = ()> = Result<T, TransformerError>;

/// Both norms of a block, with the turns that follow them.
#[derive(Debug)]
pub(super) struct HeadNorms {
    tokens: usize,
    norms: [HeadNorm; 2],
    /// Where gradients of gamma are added up.
    sums: CudaBuffer<f32>,
}

#[derive(Debug)]
struct HeadNorm {
    heads: Heads,
    params: NormParams,
    var: usize,
    /// What it makes.
    made: CudaBuffer<bf16>,
}

impl HeadNorms {
    /// The norms whose gammas are variable `var` and the next, of heads that have angles.
    pub(super) fn new<R: Recipe>(
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        (var, eps): (usize, f32),
        (heads, tokens): ([Heads; 2], usize),
        (made, sums): ([Place; 2], &Place),
    ) -> Done<Self> {
        let norm = |at: usize, heads: Heads| {
            Ok::<_, TransformerError>(HeadNorm {
                heads,
                params: NormParams {
                    gamma: var_buffer(model, var + at)?.clone(),
                    beta: None,
                    eps,
                },
                var: var + at,
                made: shared.arena.values(&made[at])?,
            })
        };
        let [q, k] = heads;
        Ok(Self {
            tokens,
            norms: [norm(0, q)?, norm(1, k)?],
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

    /// From the gradients of what attention read to those of `rows`, in place; those of gamma go to their owners.
    pub(super) fn backward<R: Recipe>(
        &self,
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        rows: [Rows<'_>; 3],
        gradients: [Rows<'_>; 3],
    ) -> Done {
        for ((norm, rows), gradient) in self.norms.iter().zip(rows).zip(gradients).rev() {
            let dgamma = f32_gradient(model, norm.var)?;
            shared.ops.norm_heads_backward(
                (&norm.heads, self.tokens),
                &norm.params,
                (rows.values, gradient.values),
                (&self.sums, &dgamma),
            )?;
            model.push_var_gradient(norm.var)?;
        }
        Ok(())
    }
}
