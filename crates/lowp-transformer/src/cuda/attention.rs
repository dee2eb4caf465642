//! [`Attention`]: causal attention by cuDNN, or by batched products over all heads, with the probabilities kept for backward.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt addresses of buffers that were made for the product"
)]

use std::sync::Arc;

use half::bf16;
use lowp_gemm::{Dtype, GemmDesc, OperandDesc, OperandPtr, Scalars};
use lowp_kernels::{Backend, CudaBuffer};

use super::TransformerError;
use super::linear::Shared;
use super::ops::Heads;
use super::place::at;
use super::sdpa::{Sdpa, SdpaSizes};
use crate::attention_slice::AttentionSlice;
use crate::places::{AttentionPlaces, CudnnPasses, CudnnPlaces, ProductPlaces};
use crate::sizes::Sizes;

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
    /// Positions that a token sees, all of a sequence at most.
    window: usize,
    way: Way,
}

/// How it is computed, and what is kept for backward.
#[derive(Debug)]
enum Way {
    Cudnn {
        /// Of one slice.
        sdpa: Arc<Sdpa>,
        slices: Vec<SliceStarts>,
        /// Rows of tokens.
        output: CudaBuffer<bf16>,
        /// The logarithms of the sums that the softmax divides by.
        stats: CudaBuffer<f32>,
        /// Where backward runs as products.
        backward: Option<Products>,
    },
    Products(Products),
}

/// Bytes from the addresses of a batch to those of a slice.
#[derive(Clone, Copy, Debug)]
struct SliceStarts {
    inputs: [u64; 3],
    output: u64,
    stats: u64,
    mask: u64,
}

/// What backward as products over heads reads.
#[derive(Debug)]
struct Products {
    /// `[sequence, head, position, dim]`.
    split: [CudaBuffer<bf16>; 3],
    /// `[sequence, head, position, position]`.
    p: CudaBuffer<bf16>,
    places: ProductPlaces,
}

/// A matrix of a batch, row-major, in which the contracted axis is the inner one or not.
fn operand(k_inner: bool, stride: usize) -> OperandDesc {
    OperandDesc {
        stride,
        ..OperandDesc::plain(Dtype::Bf16, k_inner)
    }
}

fn ptr(buffer: &CudaBuffer<bf16>) -> OperandPtr {
    OperandPtr::values(buffer.pointer())
}

impl Attention {
    /// Attention, and the places that it took.
    pub(super) fn new(
        shared: &Arc<Shared>,
        sizes: &Sizes,
        tokens: usize,
        inputs: [Heads; 3],
        output: Heads,
    ) -> Result<(Self, AttentionPlaces), TransformerError> {
        let arena = &shared.arena;
        let window = sizes.window();
        let slice = AttentionSlice::new(sizes, tokens, shared.cudnn);
        let sdpa_sizes = SdpaSizes {
            masked: shared.documents.is_some().into(),
            backward: match shared.cudnn {
                CudnnPasses::None | CudnnPasses::Forward => 0,
                CudnnPasses::Both => 1,
                CudnnPasses::AnyOrder => 2,
            },
            ..sdpa_sizes(slice, window, &inputs, &output)
        };
        let sdpa = shared.sdpa(&sdpa_sizes)?;
        let products = |places: ProductPlaces| {
            let [q, k, v] = &places.split;
            Ok::<_, TransformerError>(Products {
                split: [arena.values(q)?, arena.values(k)?, arena.values(v)?],
                p: arena.values(&places.p)?,
                places,
            })
        };
        let (way, places) = match sdpa {
            Some(sdpa) => {
                let both = sdpa.forward_only().is_none();
                let passes = if both {
                    shared.cudnn
                } else {
                    CudnnPasses::Forward
                };
                let places = CudnnPlaces::new(sizes, tokens, passes);
                let again = (!both).then(|| ProductPlaces::new(sizes, tokens, false));
                let way = Way::Cudnn {
                    sdpa,
                    slices: slices(slice, tokens, &inputs, &output),
                    output: arena.values(&places.output)?,
                    stats: arena.sums(&places.stats)?,
                    backward: again.map(products).transpose()?,
                };
                (way, AttentionPlaces::Cudnn(places, again))
            }
            None => {
                let places = ProductPlaces::new(sizes, tokens, true);
                (
                    Way::Products(products(places)?),
                    AttentionPlaces::Products(places),
                )
            }
        };
        let attention = Self {
            shared: Arc::clone(shared),
            tokens,
            inputs,
            output,
            window: window.unwrap_or(sizes.seq),
            way,
        };
        Ok((attention, places))
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
        match &self.way {
            Way::Cudnn {
                sdpa,
                slices,
                output,
                stats,
                ..
            } => {
                self.turn(inputs, 1.0)?;
                let [q, k, v] = self.places(inputs)?;
                let len = self.tokens * self.output.stride;
                let places = [q, k, v, at(output, len)?, stats.pointer()];
                for slice in slices {
                    let [q, k, v, o, stats] = slice.places(places);
                    // SAFETY: rows of the sizes that it was planned for.
                    unsafe { sdpa.forward([q, k, v, o, stats, self.mask(slice)]) }?;
                }
                self.shared.cuda.copy(output, 0..len, out.values, 0)?;
                Ok(self.shared.trace.mark(|| "attention".to_owned())?)
            }
            Way::Products(products) => self.forward_products(inputs, out, products),
        }
    }

    /// The address of what cuDNN adds to scores, or 0.
    fn mask(&self, slice: &SliceStarts) -> u64 {
        let documents = self.shared.documents.as_ref();
        let mask = documents.and_then(|documents| documents.mask.as_ref());
        mask.map_or(0, |mask| mask.pointer() + slice.mask)
    }

    /// The addresses of the first head of each input.
    fn places(&self, rows: [Rows<'_>; 3]) -> Result<[u64; 3], TransformerError> {
        let place = |which: usize| {
            let heads = &self.inputs[which];
            let rows = at(rows[which].values, self.tokens * heads.stride)?;
            Ok::<_, TransformerError>(rows + (size_of::<bf16>() * heads.first) as u64)
        };
        Ok([place(0)?, place(1)?, place(2)?])
    }

    /// Turns the heads that have positions so, or back.
    fn turn(&self, rows: [Rows<'_>; 3], sign: f32) -> Result<(), TransformerError> {
        let turned = self.inputs.iter().zip(rows);
        for (heads, rows) in turned.filter(|(heads, _)| heads.angles.is_some()) {
            self.shared
                .ops
                .rotate(heads, self.tokens, rows.values, sign)?;
        }
        Ok(())
    }

    fn forward_products(
        &self,
        inputs: [Rows<'_>; 3],
        out: Rows<'_>,
        products: &Products,
    ) -> Result<(), TransformerError> {
        self.probabilities(&self.inputs, inputs, products)?;
        let Shared {
            ops, gemms, arena, ..
        } = &*self.shared;
        let Products { split, p, places } = products;
        let seen = arena.values(&places.heads)?;
        // SAFETY: all buffers of this attention have the sizes of the product.
        unsafe {
            gemms.run(
                &self.mix([true, false]),
                [ptr(p), ptr(&split[2])],
                seen.pointer(),
                Scalars::ONE,
            )
        }?;
        ops.merge(&self.output, self.tokens, &seen, out.values)
    }

    /// From rows, in which `heads` are, to queries, keys and values by head, and probabilities.
    fn probabilities(
        &self,
        heads: &[Heads; 3],
        rows: [Rows<'_>; 3],
        Products { split, p, places }: &Products,
    ) -> Result<(), TransformerError> {
        let Shared {
            ops, gemms, arena, ..
        } = &*self.shared;
        let [matrices, seq, dim] = self.sizes();
        for ((heads, rows), to) in heads.iter().zip(rows).zip(split) {
            ops.split(heads, self.tokens, rows.values, to)?;
        }
        let [q, k, _] = split;
        let scores = arena.sums(&places.scores)?;
        let (of_heads, of_scores) = (seq * dim, seq * seq);
        let heads = [operand(true, of_heads); 2];
        let desc = GemmDesc {
            out_stride: of_scores,
            batch: matrices,
            ..GemmDesc::new([seq, seq, dim], heads, Dtype::F32)
        };
        // SAFETY: all buffers of this attention have the sizes of the product.
        unsafe {
            gemms.run(
                &desc,
                [ptr(q), ptr(k)],
                scores.pointer(),
                Scalars::Host {
                    alpha: self.scale(),
                    beta: 0.0,
                },
            )
        }?;
        let documents = self.shared.documents.as_ref();
        let first_seen = documents.map(|documents| &documents.first);
        let heads = self.output.count;
        let sizes = [matrices / heads, heads, seq];
        ops.softmax(&scores, p, sizes, self.window, first_seen)
    }

    /// `[position, position]` by `[position, dim]`.
    fn mix(&self, [left, right]: [bool; 2]) -> GemmDesc {
        let [matrices, seq, dim] = self.sizes();
        let operands = [operand(left, seq * seq), operand(right, seq * dim)];
        GemmDesc {
            out_stride: seq * dim,
            batch: matrices,
            ..GemmDesc::new([seq, dim, seq], operands, Dtype::Bf16)
        }
    }

    /// From the gradient of `forward`'s result to those of its inputs. `kept` are the rows that forward read, where they must stay.
    pub(super) fn backward(
        &self,
        gradient: Rows<'_>,
        kept: [Rows<'_>; 3],
        inputs: [Rows<'_>; 3],
    ) -> Result<(), TransformerError> {
        match &self.way {
            Way::Cudnn {
                backward: Some(products),
                ..
            } => {
                // What forward read has been turned.
                let turned = self.inputs.clone().map(|heads| Heads {
                    angles: None,
                    ..heads
                });
                self.probabilities(&turned, kept, products)?;
                self.backward_products(gradient, inputs, products)
            }
            Way::Cudnn {
                sdpa,
                slices,
                output,
                stats,
                backward: None,
            } => {
                let ([q, k, v], [dq, dk, dv]) = (self.places(kept)?, self.places(inputs)?);
                let gradient = at(gradient.values, self.tokens * self.output.stride)?;
                let kept = [q, k, v, output.pointer(), stats.pointer()];
                let gradients = [dq, dk, dv, gradient, 0];
                for slice in slices {
                    let [q, k, v, o, stats] = slice.places(kept);
                    let [dq, dk, dv, gradient, _] = slice.places(gradients);
                    let mask = self.mask(slice);
                    let places = [q, k, v, o, stats, mask, gradient, dq, dk, dv];
                    // SAFETY: rows of the sizes that it was planned for.
                    unsafe { sdpa.backward(places) }?;
                }
                self.shared.trace.mark(|| "attention backward".to_owned())?;
                self.turn(inputs, -1.0)
            }
            Way::Products(products) => self.backward_products(gradient, inputs, products),
        }
    }

    fn backward_products(
        &self,
        gradient: Rows<'_>,
        inputs: [Rows<'_>; 3],
        Products { split, p, places }: &Products,
    ) -> Result<(), TransformerError> {
        let Shared {
            ops, gemms, arena, ..
        } = &*self.shared;
        let [matrices, seq, dim] = self.sizes();
        let [q, k, v] = split;
        let dout = arena.values(&places.heads)?;
        ops.split(&self.output, self.tokens, gradient.values, &dout)?;
        let to = |at: usize| Rows {
            values: inputs[at].values,
        };
        let dhead = arena.values(&places.dheads)?;
        // SAFETY: as in `forward`.
        unsafe {
            gemms.run(
                &self.mix([false, false]),
                [ptr(p), ptr(&dout)],
                dhead.pointer(),
                Scalars::ONE,
            )
        }?;
        ops.merge(&self.inputs[2], self.tokens, &dhead, to(2).values)?;
        let dp = arena.sums(&places.scores)?;
        let heads = [operand(true, seq * dim); 2];
        let desc = GemmDesc {
            out_stride: seq * seq,
            batch: matrices,
            ..GemmDesc::new([seq, seq, dim], heads, Dtype::F32)
        };
        // SAFETY: as in `forward`.
        unsafe { gemms.run(&desc, [ptr(&dout), ptr(v)], dp.pointer(), Scalars::ONE) }?;
        let ds = arena.values(&places.dscores)?;
        ops.softmax_backward(p, &dp, &ds, matrices, seq, self.scale())?;
        for (at, left, right) in [(0, true, k), (1, false, q)] {
            // SAFETY: as in `forward`.
            unsafe {
                gemms.run(
                    &self.mix([left, false]),
                    [ptr(&ds), ptr(right)],
                    dhead.pointer(),
                    Scalars::ONE,
                )
            }?;
            ops.merge(&self.inputs[at], self.tokens, &dhead, to(at).values)?;
        }
        Ok(())
    }
}

impl SliceStarts {
    /// From those of a batch: of queries, keys and values, of the output, and of statistics.
    fn places(&self, [q, k, v, o, stats]: [u64; 5]) -> [u64; 5] {
        let [of_q, of_k, of_v] = self.inputs;
        [
            q + of_q,
            k + of_k,
            v + of_v,
            o + self.output,
            stats + self.stats,
        ]
    }
}

/// Where the slices of a batch of `tokens` start.
fn slices(
    slice: AttentionSlice,
    tokens: usize,
    inputs: &[Heads; 3],
    output: &Heads,
) -> Vec<SliceStarts> {
    let (sequences, seq) = (tokens / output.seq, output.seq);
    let values = |heads: &Heads, sequence: usize, head: usize| {
        (size_of::<bf16>() * (sequence * seq * heads.stride + head * heads.dim)) as u64
    };
    let starts = (0..sequences).step_by(slice.sequences).flat_map(|first| {
        let heads = (0..inputs[1].count).step_by(slice.kv_heads);
        heads.map(move |kv_head| (first, kv_head))
    });
    starts
        .map(|(first, kv_head)| {
            let head = slice.group * kv_head;
            let [q, k, v] = inputs;
            SliceStarts {
                inputs: [
                    values(q, first, head),
                    values(k, first, kv_head),
                    values(v, first, kv_head),
                ],
                output: values(output, first, head),
                stats: (size_of::<f32>() * (first * output.count + head) * seq) as u64,
                mask: (size_of::<bf16>() * first * seq * seq) as u64,
            }
        })
        .collect()
}

/// What cuDNN plans attention by.
fn sdpa_sizes(
    slice: AttentionSlice,
    window: Option<usize>,
    inputs: &[Heads; 3],
    output: &Heads,
) -> SdpaSizes {
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let strides = |heads: &Heads| {
        [
            number(heads.seq * heads.stride),
            number(heads.dim),
            number(heads.stride),
        ]
    };
    let [q, k, v] = inputs;
    SdpaSizes {
        sequences: number(slice.sequences),
        heads: number(slice.heads()),
        kv_heads: number(slice.kv_heads),
        seq: number(output.seq),
        dim: number(output.dim),
        window: window.map_or(0, number),
        masked: 0,
        backward: 1,
        q: strides(q),
        k: strides(k),
        v: strides(v),
        o: strides(output),
        scale: 1.0 / (output.dim as f32).sqrt(),
    }
}
