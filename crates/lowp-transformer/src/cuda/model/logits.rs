//! Logits on the host.

use std::ops::Range;

use lowp_format::Recipe;
use lowp_gemm::{Dtype, OperandPtr, Scalars};
use lowp_kernels::{Backend, CudaBuffer};

use super::{Done, Tokens, Transformer, Values, dense, ptr};
use crate::places::BF16;

impl<R: Recipe> Transformer<R> {
    /// The logits of a micro-batch, `[tokens, vocabulary]`, where a token sees all before it in its sequence: waits for the device.
    ///
    /// # Errors
    /// As [`Transformer::train`].
    pub fn logits(&mut self, inputs: &[u32]) -> Done<Vec<f32>> {
        self.forward(Tokens {
            inputs,
            targets: inputs,
            first_seen: None,
        })?;
        let (cuda, vocab) = (&self.shared.cuda, self.sizes.vocab);
        let h = self.shared.arena.values(&self.shared.places.last)?;
        let logits = self.shared.arena.sums(&self.shared.places.logits)?;
        let mut all = Vec::with_capacity(self.tokens * vocab);
        for tokens in self.parts() {
            let len = tokens.len() * vocab;
            self.enqueue_logits(tokens, &h, &logits)?;
            all.extend_from_slice(&cuda.download(&logits)?[..len]);
        }
        Ok(all)
    }

    /// The tokens whose logits are there at a time.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<R> {
        let (all, rows) = (self.tokens, self.shared.places.head_rows);
        let firsts = (0..all).step_by(rows);
        firsts.map(move |first| first..all.min(first + rows))
    }

    /// Makes the logits of `tokens`, and gives the rows of `h` that they are made of.
    pub(super) fn enqueue_logits(
        &self,
        tokens: Range<usize>,
        h: &Values,
        logits: &CudaBuffer<f32>,
    ) -> Done<OperandPtr> {
        let [dim, vocab] = [self.sizes.dim, self.sizes.vocab];
        let rows = OperandPtr::values(h.pointer() + (BF16 * tokens.start * dim) as u64);
        let desc = dense([tokens.len(), vocab, dim], [true, true], Dtype::F32);
        let operands = [rows, ptr(&self.head_values)];
        let gemms = &self.shared.gemms;
        // SAFETY: rows of `[tokens, dim]` by the head, `[vocab, dim]`.
        unsafe { gemms.run(&desc, operands, logits.pointer(), Scalars::ONE) }?;
        Ok(rows)
    }
}
