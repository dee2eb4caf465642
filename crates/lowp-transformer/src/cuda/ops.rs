//! [`Ops`]: the operations of a transformer between its products, each one launch.

#![expect(
    unsafe_code,
    reason = "launches kernels over addresses of buffers whose lengths were checked"
)]

use std::sync::Arc;

use half::bf16;
use lowp_kernels::{Cuda, CudaBuffer, KernelError};

use super::TransformerError;
use super::module::Kernels;
use super::place::at;
use super::trace::Trace;
use crate::params::{self, Arg};
use crate::places::{NORM_HEADS, NORM_ROWS, head_norm_sums, norm_sums};

mod args;

pub(super) use args::{
    Branch, CrossEntropy, EmbeddingSizes, Heads, NormBackward, NormParams, NormedHeads,
};

type Values = CudaBuffer<bf16>;
type Sums = CudaBuffer<f32>;
type Done = Result<(), TransformerError>;

/// Threads of blocks that take eight values each.
pub(super) const THREADS: usize = 256;

/// The kernels of this crate on one stream.
#[derive(Debug)]
pub(super) struct Ops(Kernels, Arc<Trace>);

fn null_or<T: lowp_kernels::Element>(
    buffer: Option<&CudaBuffer<T>>,
    len: usize,
) -> Result<Arg, TransformerError> {
    Ok(Arg::Pointer(match buffer {
        Some(buffer) => at(buffer, len)?,
        None => 0,
    }))
}

impl Ops {
    pub(super) fn new(cuda: &Cuda, trace: &Arc<Trace>) -> Result<Self, KernelError> {
        Ok(Self(Kernels::load(cuda)?, Arc::clone(trace)))
    }

    /// Gives the stream a launch.
    ///
    /// # Safety
    /// As [`Kernels::launch`].
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        blocks: [usize; 2],
        threads: [usize; 2],
        args: &[Arg],
    ) -> Done {
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(name, blocks, threads, args) }?;
        Ok(self.1.mark(|| name.to_owned())?)
    }

    /// The same with a thread for each of `count` things, which is the last parameter.
    ///
    /// # Safety
    /// As [`Kernels::launch`].
    pub(super) unsafe fn launch_each(
        &self,
        name: &'static str,
        args: &[Arg],
        count: usize,
    ) -> Done {
        let args = [args, &[Arg::Size(count)]].concat();
        // SAFETY: the caller's promise.
        unsafe { self.launch(name, [count.div_ceil(THREADS), 1], [THREADS, 1], &args) }
    }

    /// `branch.sum = x + branch.values` where there is a branch, and `h` the norm of the sum, or of `x`. `x` is `[tokens, dim]`; `stats` two
    /// values per row.
    pub(super) fn norm(
        &self,
        [tokens, dim]: [usize; 2],
        x: &Values,
        branch: Option<Branch<'_>>,
        params: &NormParams,
        h: &Values,
        stats: &Sums,
    ) -> Done {
        let len = tokens * dim;
        let args = [
            Arg::Pointer(at(x, len)?),
            null_or(branch.map(|branch| branch.values), len)?,
            null_or(branch.map(|branch| branch.sum), len)?,
            Arg::Pointer(at(h, len)?),
            Arg::Pointer(at(&params.gamma, dim)?),
            null_or(params.beta.as_ref(), dim)?,
            Arg::Pointer(at(stats, 2 * tokens)?),
            int(dim)?,
            Arg::Float(params.eps),
        ];
        let threads = row_threads(dim)?;
        // SAFETY: buffers as long as the kernel takes them to be.
        unsafe { self.launch("norm_forward", [tokens, 1], [threads, 1], &args) }
    }

    /// `dx = residual + the gradient for x`, and those of gamma and beta.
    pub(super) fn norm_backward(
        &self,
        [tokens, dim]: [usize; 2],
        params: &NormParams,
        NormBackward {
            dh,
            x,
            stats,
            residual,
            dx,
            partial,
            dgamma,
            dbeta,
        }: NormBackward<'_>,
    ) -> Done {
        let len = tokens * dim;
        let blocks = tokens.div_ceil(NORM_ROWS);
        let args = [
            Arg::Pointer(at(dh, len)?),
            Arg::Pointer(at(x, len)?),
            Arg::Pointer(at(stats, 2 * tokens)?),
            Arg::Pointer(at(&params.gamma, dim)?),
            null_or(residual, len)?,
            Arg::Pointer(at(dx, len)?),
            Arg::Pointer(at(partial, norm_sums(tokens, dim))?),
            int(tokens)?,
            int(dim)?,
            int(NORM_ROWS)?,
            int(usize::from(params.beta.is_some()))?,
        ];
        let threads = row_threads(dim)?;
        // SAFETY: as in `norm`.
        unsafe { self.launch("norm_backward", [blocks, 1], [threads, 1], &args) }?;
        let args = [
            Arg::Pointer(partial.pointer()),
            int(blocks)?,
            int(dim)?,
            Arg::Pointer(at(dgamma, dim)?),
            null_or(dbeta, dim)?,
        ];
        // SAFETY: as above.
        unsafe { self.launch("column_sums", [(2 * dim).div_ceil(32), 1], [32, 8], &args) }
    }

    /// f32 values, to nearest even.
    pub(super) fn narrow(&self, from: &CudaBuffer<u8>, to: &Values, len: usize) -> Done {
        let args = [Arg::Pointer(at(from, 4 * len)?), Arg::Pointer(at(to, len)?)];
        // SAFETY: as in `norm`.
        unsafe { self.launch_each("narrow", &args, octets(len)?) }
    }

    /// The factor of a product of two-level codes, from both amaxes and the reciprocal of the largest values under them; and 0 and 1, for
    /// what was there.
    pub(super) fn two_level_factors(&self, amaxes: [u64; 2], reciprocal: f32, to: &Sums) -> Done {
        let [a, b] = amaxes.map(Arg::Pointer);
        let args = [a, b, Arg::Float(reciprocal), Arg::Pointer(at(to, 3)?)];
        // SAFETY: operands have an amax each, and the result has its length.
        unsafe { self.launch("two_level_factors", [1, 1], [1, 1], &args) }
    }

    /// Copies heads out of rows of tokens.
    pub(super) fn split(&self, heads: &Heads, tokens: usize, from: &Values, to: &Values) -> Done {
        self.heads("split_heads", heads, tokens, from, to, |from, to| {
            [from, to]
        })
    }

    /// Copies heads into rows of tokens, or the sums of those that share one.
    pub(super) fn merge(&self, heads: &Heads, tokens: usize, from: &Values, to: &Values) -> Done {
        self.heads("merge_heads", heads, tokens, to, from, |rows, heads| {
            [heads, rows]
        })
    }

    fn heads(
        &self,
        name: &'static str,
        Heads {
            count,
            groups,
            dim,
            seq,
            stride,
            first,
            angles,
        }: &Heads,
        tokens: usize,
        rows: &Values,
        split: &Values,
        order: impl Fn(u64, u64) -> [u64; 2],
    ) -> Done {
        if first + count * dim > *stride || !dim.is_multiple_of(16) || !tokens.is_multiple_of(*seq)
        {
            let text = format!(
                "{count} heads of {dim} from {first} on in rows of {stride}, {tokens} tokens in sequences of {seq}"
            );
            return Err(TransformerError::Unsupported(text));
        }
        octets(*stride)?;
        let rows = at(rows, tokens * stride)? + (size_of::<bf16>() * first) as u64;
        let [from, to] = order(rows, at(split, tokens * count * groups * dim)?);
        let args = [
            Arg::Pointer(from),
            Arg::Pointer(to),
            null_or(angles.as_ref(), seq * dim)?,
            int(*stride)?,
            int(*count)?,
            int(*groups)?,
            int(*seq)?,
            int(*dim)?,
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch_each(name, &args, tokens * count * dim / 16) }
    }

    /// Turns heads, which fill their rows, by their positions in place, or with -1 back.
    pub(super) fn rotate(&self, heads: &Heads, tokens: usize, rows: &Values, sign: f32) -> Done {
        let Heads {
            count,
            dim,
            seq,
            stride,
            ..
        } = heads;
        if count * dim != *stride || !dim.is_multiple_of(16) {
            let text = format!("{count} heads of {dim} in rows of {stride}");
            return Err(TransformerError::Unsupported(text));
        }
        let args = [
            Arg::Pointer(at(rows, tokens * stride)?),
            null_or(heads.angles.as_ref(), seq * dim)?,
            int(*count)?,
            int(*seq)?,
            int(*dim)?,
            Arg::Float(sign),
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch_each("rotate", &args, tokens * count * dim / 16) }
    }

    /// `y`: each head of `x`, which fill their rows, over its root mean square and times gamma, turned by the position of its token.
    pub(super) fn norm_heads(&self, of: NormedHeads<'_>, x: &Values, y: &Values) -> Done {
        let NormedHeads {
            heads,
            tokens,
            params,
        } = of;
        let OfHeads { len, sizes, each } = of_heads(heads, tokens)?;
        let mut args = vec![
            Arg::Pointer(at(x, len)?),
            Arg::Pointer(at(y, len)?),
            Arg::Pointer(at(&params.gamma, heads.dim)?),
            null_or(heads.angles.as_ref(), heads.seq * heads.dim)?,
        ];
        args.extend(sizes);
        args.extend([Arg::Float(params.eps), Arg::Size(tokens * heads.count)]);
        let blocks = (tokens * heads.count * each).div_ceil(THREADS);
        // SAFETY: as in `norm`.
        unsafe { self.launch("norm_heads", [blocks, 1], [THREADS, 1], &args) }
    }

    /// The gradient for `x` in the place of that for the result, and that of gamma; `partial` is memory for the sums of blocks.
    pub(super) fn norm_heads_backward(
        &self,
        of: NormedHeads<'_>,
        x: &Values,
        dy: &Values,
        partial: &Sums,
        dgamma: &Sums,
    ) -> Done {
        let NormedHeads {
            heads,
            tokens,
            params,
        } = of;
        let OfHeads { len, sizes, .. } = of_heads(heads, tokens)?;
        let (dim, all) = (heads.dim, tokens * heads.count);
        let mut args = vec![
            Arg::Pointer(at(x, len)?),
            Arg::Pointer(at(dy, len)?),
            Arg::Pointer(at(&params.gamma, dim)?),
            null_or(heads.angles.as_ref(), heads.seq * dim)?,
            Arg::Pointer(at(partial, head_norm_sums(all, dim))?),
        ];
        args.extend(sizes);
        args.extend([int(NORM_HEADS)?, Arg::Float(params.eps), Arg::Size(all)]);
        let blocks = all.div_ceil(NORM_HEADS);
        // SAFETY: as in `norm`.
        unsafe { self.launch("norm_heads_backward", [blocks, 1], [THREADS, 1], &args) }?;
        // Both halves of a row go to one vector.
        let (half, to) = (dim / 2, at(dgamma, dim)?);
        let args = [
            Arg::Pointer(partial.pointer()),
            int(blocks)?,
            int(half)?,
            Arg::Pointer(to),
            Arg::Pointer(to + (size_of::<f32>() * half) as u64),
        ];
        // SAFETY: as above.
        unsafe { self.launch("column_sums", [dim.div_ceil(32), 1], [32, 8], &args) }
    }

    /// What cuDNN adds to scores, from the first position that each token sees.
    pub(super) fn document_mask(
        &self,
        first_seen: &CudaBuffer<u8>,
        mask: &Values,
        [tokens, seq]: [usize; 2],
    ) -> Done {
        let args = [
            Arg::Pointer(at(first_seen, 4 * tokens)?),
            Arg::Pointer(at(mask, tokens * seq)?),
            int(seq)?,
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch("document_mask", [tokens, 1], [THREADS, 1], &args) }
    }

    /// Softmax of the `[seq, seq]` scores of each head of each sequence, of which a row sees the last `window` up to its own, and none
    /// before the first that its token sees.
    pub(super) fn softmax(
        &self,
        scores: &Sums,
        p: &Values,
        [sequences, heads, seq]: [usize; 3],
        window: usize,
        first_seen: Option<&CudaBuffer<u8>>,
    ) -> Done {
        let matrices = sequences * heads;
        let len = matrices * seq * seq;
        let args = [
            Arg::Pointer(at(scores, len)?),
            Arg::Pointer(at(p, len)?),
            null_or(first_seen, 4 * sequences * seq)?,
            int(seq)?,
            int(heads)?,
            int(window)?,
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch("softmax_forward", [matrices * seq, 1], [128, 1], &args) }
    }

    /// The gradient of scores that were multiplied by `scale`.
    pub(super) fn softmax_backward(
        &self,
        p: &Values,
        dp: &Sums,
        ds: &Values,
        matrices: usize,
        seq: usize,
        scale: f32,
    ) -> Done {
        let len = matrices * seq * seq;
        let args = [
            Arg::Pointer(at(p, len)?),
            Arg::Pointer(at(dp, len)?),
            Arg::Pointer(at(ds, len)?),
            int(seq)?,
            Arg::Float(scale),
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch("softmax_backward", [matrices * seq, 1], [128, 1], &args) }
    }

    /// Rows of `table` by token, and of `positions`. `ids` are below `vocab`.
    pub(super) fn embedding(
        &self,
        sizes: EmbeddingSizes,
        ids: &CudaBuffer<u8>,
        table: &CudaBuffer<u8>,
        positions: Option<&Sums>,
        x: &Values,
    ) -> Done {
        let EmbeddingSizes {
            tokens,
            dim,
            seq,
            vocab,
        } = sizes;
        let args = [
            Arg::Pointer(at(ids, 4 * tokens)?),
            Arg::Pointer(at(table, 4 * vocab * dim)?),
            null_or(positions, seq * dim)?,
            Arg::Pointer(at(x, tokens * dim)?),
            int(seq)?,
            int(dim)?,
        ];
        // SAFETY: as in `norm`; the ids of a batch are checked where it is made.
        unsafe { self.launch_each("embedding_forward", &args, tokens * octets(dim)?) }
    }

    /// Row `r` of `out` is the sum of the rows of `dx` that `order` has from `starts[r]` to `starts[r + 1]`, and of that row of `plus`.
    pub(super) fn sum_rows(
        &self,
        dx: &Values,
        starts: &CudaBuffer<u8>,
        order: &CudaBuffer<u8>,
        plus: Option<&Sums>,
        out: &Sums,
        [tokens, rows, dim]: [usize; 3],
    ) -> Done {
        let args = [
            Arg::Pointer(at(dx, tokens * dim)?),
            Arg::Pointer(at(starts, 4 * (rows + 1))?),
            Arg::Pointer(at(order, 4 * tokens)?),
            null_or(plus, rows * dim)?,
            Arg::Pointer(at(out, rows * dim)?),
            int(dim)?,
        ];
        let warps = octets(dim)?.div_ceil(32);
        // SAFETY: as in `norm`; the rows of a batch are checked where it is made.
        unsafe { self.launch("sum_rows", [rows, warps], [32, 1], &args) }
    }

    /// The losses of some tokens of a batch, whose logits are given, and their gradients where they have a place.
    pub(super) fn cross_entropy(
        &self,
        CrossEntropy {
            tokens,
            vocab,
            logits,
            targets,
            losses,
            gradients,
            scale,
            z_loss,
        }: CrossEntropy<'_>,
    ) -> Done {
        let first = 4 * tokens.start as u64;
        let (last, tokens) = (tokens.end, tokens.len());
        let args = [
            Arg::Pointer(at(logits, tokens * vocab)?),
            Arg::Pointer(at(targets, 4 * last)? + first),
            Arg::Pointer(at(losses, last)? + first),
            null_or(gradients, tokens * vocab)?,
            int(vocab)?,
            Arg::Float(scale),
            Arg::Float(z_loss),
        ];
        let threads = if vocab < 1024 { 128 } else { 512 };
        // SAFETY: as in `norm`; targets of a batch are checked where it is made.
        unsafe { self.launch("cross_entropy", [tokens, 1], [threads, 1], &args) }
    }

    /// Adds `scale` times the sum of `losses` to `total`.
    pub(super) fn add_losses(
        &self,
        losses: &Sums,
        tokens: usize,
        scale: f32,
        total: &Sums,
    ) -> Done {
        let args = [
            Arg::Pointer(at(losses, tokens)?),
            int(tokens)?,
            Arg::Float(scale),
            Arg::Pointer(at(total, 1)?),
        ];
        // SAFETY: as in `norm`.
        unsafe { self.launch("add_losses", [1, 1], [THREADS, 1], &args) }
    }
}

/// What the kernels of norms of heads take: values in all, the number of heads of a token, positions, values and threads of a head, and
/// these threads.
struct OfHeads {
    len: usize,
    sizes: [Arg; 4],
    each: usize,
}

fn of_heads(heads: &Heads, tokens: usize) -> Result<OfHeads, TransformerError> {
    let Heads {
        count,
        dim,
        seq,
        stride,
        ..
    } = *heads;
    // A power of two, so that the sum over a head is one over neighbours.
    let each = (dim / 16).next_power_of_two();
    if count * dim != stride || !dim.is_multiple_of(16) || each > 32 || heads.angles.is_none() {
        let text = format!("norms of {count} heads of {dim} in rows of {stride}");
        return Err(TransformerError::Unsupported(text));
    }
    Ok(OfHeads {
        len: tokens * stride,
        sizes: [int(count)?, int(seq)?, int(dim)?, int(each)?],
        each,
    })
}

/// A thread for eight columns, in whole warps.
fn row_threads(dim: usize) -> Result<usize, TransformerError> {
    Ok(octets(dim)?.next_multiple_of(32))
}

/// Groups of eight of `len` values.
pub(super) fn octets(len: usize) -> Result<usize, TransformerError> {
    params::octets(len).map_err(TransformerError::Unsupported)
}

pub(super) fn int(n: usize) -> Result<Arg, TransformerError> {
    Arg::int(n).map_err(TransformerError::Unsupported)
}
