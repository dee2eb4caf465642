//! [`Attention`]: causal attention by batched products over all heads, with the probabilities kept for backward.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt addresses of buffers that were made for the product"
)]

use std::sync::Arc;

use half::bf16;
use lowp_kernels::{Backend, CudaBuffer};

use super::TransformerError;
use super::linear::Shared;
use super::matmul::{Dtype, Place, Product, Scale, Side};
use super::ops::Heads;

/// Rows of tokens with heads in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) values: &'a CudaBuffer<bf16>,
}

/// The attention of one block, over whole sequences.
#[derive(Debug)]
pub(super) struct Attention {
    shared: Arc<Shared>,
    tokens: usize,
    /// Queries, keys and values in their rows.
    inputs: [Heads; 3],
    output: Heads,
    /// `[sequence, head, position, dim]`, kept for backward.
    split: [CudaBuffer<bf16>; 3],
    /// `[sequence, head, position, position]`, kept for backward.
    p: CudaBuffer<bf16>,
}

/// A matrix of a batch, row-major, in which the contracted axis is the inner one or not.
fn side(k_inner: bool, stride: usize) -> Side {
    Side {
        dtype: Dtype::Bf16,
        scale: Scale::None,
        k_inner,
        stride,
    }
}

fn place(buffer: &CudaBuffer<bf16>) -> Place {
    Place {
        data: buffer.pointer(),
        scale: 0,
    }
}

impl Attention {
    pub(super) fn new(
        shared: &Arc<Shared>,
        tokens: usize,
        inputs: [Heads; 3],
        output: Heads,
    ) -> Result<Self, TransformerError> {
        let cuda = &shared.cuda;
        let Heads {
            count, dim, seq, ..
        } = output;
        let split = || cuda.alloc::<bf16>(tokens * count * dim);
        Ok(Self {
            shared: Arc::clone(shared),
            tokens,
            inputs,
            split: [split()?, split()?, split()?],
            p: cuda.alloc(tokens * count * seq)?,
            output,
        })
    }

    /// Matrices in a batch, positions, and values of a head.
    fn sizes(&self) -> [usize; 3] {
        let Heads {
            count, dim, seq, ..
        } = self.output;
        [self.tokens / seq * count, seq, dim]
    }

    fn scale(&self) -> f32 {
        1.0 / (self.output.dim as f32).sqrt()
    }

    /// From rows of queries, keys and values to rows of what each head sees.
    pub(super) fn forward(
        &self,
        inputs: [Rows<'_>; 3],
        out: Rows<'_>,
    ) -> Result<(), TransformerError> {
        let Shared {
            ops,
            matmuls,
            arena,
            ..
        } = &*self.shared;
        let [matrices, seq, dim] = self.sizes();
        for ((heads, rows), to) in self.inputs.iter().zip(inputs).zip(&self.split) {
            ops.split(heads, self.tokens, rows.values, to)?;
        }
        let [q, k, v] = &self.split;
        let scores = arena.sums("scores", matrices * seq * seq)?;
        let (of_heads, of_scores) = (seq * dim, seq * seq);
        let product = Product {
            rows: seq,
            cols: seq,
            k: dim,
            left: side(true, of_heads),
            right: side(true, of_heads),
            out: Dtype::F32,
            out_stride: of_scores,
            batch: matrices,
            fast: false,
        };
        // SAFETY: all buffers of this attention have the sizes of the product.
        unsafe {
            matmuls.run(
                &product,
                [place(q), place(k)],
                scores.pointer(),
                (self.scale(), false),
            )
        }?;
        ops.softmax(&scores, &self.p, matrices, seq)?;
        let seen = arena.values("heads", matrices * seq * dim)?;
        // SAFETY: as above.
        unsafe {
            matmuls.run(
                &self.mix([true, false]),
                [place(&self.p), place(v)],
                seen.pointer(),
                (1.0, false),
            )
        }?;
        ops.merge(&self.output, self.tokens, &seen, out.values)
    }

    /// `[position, position]` by `[position, dim]`.
    fn mix(&self, [left, right]: [bool; 2]) -> Product {
        let [matrices, seq, dim] = self.sizes();
        Product {
            rows: seq,
            cols: dim,
            k: seq,
            left: side(left, seq * seq),
            right: side(right, seq * dim),
            out: Dtype::Bf16,
            out_stride: seq * dim,
            batch: matrices,
            fast: false,
        }
    }

    /// From the gradient of `forward`'s result to those of its inputs.
    pub(super) fn backward(
        &self,
        gradient: Rows<'_>,
        inputs: [Rows<'_>; 3],
    ) -> Result<(), TransformerError> {
        let Shared {
            ops,
            matmuls,
            arena,
            ..
        } = &*self.shared;
        let [matrices, seq, dim] = self.sizes();
        let [q, k, v] = &self.split;
        let len = matrices * seq * dim;
        let dout = arena.values("heads", len)?;
        ops.split(&self.output, self.tokens, gradient.values, &dout)?;
        let to = |at: usize| Rows {
            values: inputs[at].values,
        };
        let dhead = arena.values("head gradients", len)?;
        // SAFETY: as in `forward`.
        unsafe {
            matmuls.run(
                &self.mix([false, false]),
                [place(&self.p), place(&dout)],
                dhead.pointer(),
                (1.0, false),
            )
        }?;
        ops.merge(&self.inputs[2], self.tokens, &dhead, to(2).values)?;
        let dp = arena.sums("scores", matrices * seq * seq)?;
        let product = Product {
            rows: seq,
            cols: seq,
            k: dim,
            left: side(true, seq * dim),
            right: side(true, seq * dim),
            out: Dtype::F32,
            out_stride: seq * seq,
            batch: matrices,
            fast: false,
        };
        // SAFETY: as in `forward`.
        unsafe {
            matmuls.run(
                &product,
                [place(&dout), place(v)],
                dp.pointer(),
                (1.0, false),
            )
        }?;
        let ds = arena.values("score gradients", matrices * seq * seq)?;
        ops.softmax_backward((&self.p, &dp, &ds), matrices, seq, self.scale())?;
        for (at, left, right) in [(0, true, k), (1, false, q)] {
            // SAFETY: as in `forward`.
            unsafe {
                matmuls.run(
                    &self.mix([left, false]),
                    [place(&ds), place(right)],
                    dhead.pointer(),
                    (1.0, false),
                )
            }?;
            ops.merge(&self.inputs[at], self.tokens, &dhead, to(at).values)?;
        }
        Ok(())
    }
}
