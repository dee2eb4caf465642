//! [`ModelMemory`]: what a model holds on a GPU beside its parameters.

use std::collections::HashSet;

use lowp_format::{FormatError, Recipe, Shape};
use serde::Serialize;

use crate::linear_plan::{LinearPlan, WeightUse};
use crate::places::{
    AttentionPlaces, BlockPlaces, CudnnPasses, DocumentPlaces, ModelPlaces, Place, Stays,
};
use crate::sizes::Sizes;

/// The compute capability of H100 and H200.
pub const HOPPER: (i32, i32) = (9, 0);

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Sequences on this GPU.
    pub sequences: usize,
    /// The number of their first token in the micro-batch of all ranks.
    pub first_token: u64,
    /// The passes of attention that run by cuDNN, where that is found and has them.
    pub cudnn: CudnnPasses,
    /// Whether amaxes of operands are agreed on over all ranks, where they are not from earlier steps.
    pub agree_amaxes: bool,
    /// Whether weights of a block are gathered while the one before it runs.
    pub prefetch: bool,
    /// Whether only what blocks read is kept for backward, which runs them forward again.
    pub recompute: bool,
    /// Whether a token may see less than all before it: documents that are packed together are apart.
    pub documents: bool,
}

/// Bytes that a model holds on a GPU beside its parameters. Tables of plans and of batches are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelMemory {
    /// What each block keeps from forward to backward, the residual stream and its gradient, and the batch.
    pub activations: u64,
    /// What layers use one after the other: operands and their codes, logits, gradients of activations.
    pub in_turn: u64,
    /// What products and attention work in.
    pub workspaces: u64,
}

impl ModelMemory {
    /// Of a model of these sizes, whose linear layers live in `recipes`, on a GPU of this compute capability. What cuDNN works in is
    /// taken to be what it asks for on Hopper.
    ///
    /// # Errors
    /// Sizes or a recipe that a GPU cannot take.
    pub fn new<R: Recipe>(
        sizes: &Sizes,
        recipes: &[R],
        batch: &MicroBatch,
        capability: (i32, i32),
    ) -> Result<Self, String> {
        sizes.check()?;
        let tokens = batch.tokens(sizes.seq)?;
        let mut ledger = Ledger::new(batch.recompute);
        ledger.add_all(ModelPlaces::new(sizes, tokens).all());
        if batch.documents {
            let mask = batch.cudnn != CudnnPasses::None;
            ledger.add_all(DocumentPlaces::new(sizes, tokens, mask).all());
        }
        let block = BlockPlaces::new(sizes, tokens);
        let attention = AttentionPlaces::new(sizes, tokens, batch.cudnn);
        let linears = sizes.linears();
        let mut plans: Vec<LinearPlan> = Vec::new();
        for (at, ([rows, cols], recipe)) in linears.into_iter().zip(recipes).enumerate() {
            let names = &block.operands[at % block.operands.len()];
            if at.is_multiple_of(block.operands.len()) {
                ledger.add_all(block.all(&attention));
                ledger.add_all(attention.of_block());
                plans.clear();
            }
            let shape = Shape::new(rows, cols);
            let plan = LinearPlan::new(recipe, shape, tokens, names, capability);
            let plan = plan.map_err(|error: FormatError| error.to_string())?;
            ledger.add_all(plan.places());
            let before = plans.iter().zip(block.operands);
            let mut readers = before.filter(|(_, other)| other.reads == names.reads);
            if !readers.any(|(other, _)| other.shares_input(&plan)) {
                ledger.add_all(plan.input_places());
            }
            for weight in plan.weights {
                match weight {
                    WeightUse::AsItIs => {}
                    WeightUse::Decode(place) | WeightUse::Repack { place, .. } => {
                        ledger.add(place);
                    }
                }
            }
            plans.push(plan);
        }
        ledger.add_all(attention.of_all());
        Ok(ledger.memory)
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.activations + self.in_turn + self.workspaces
    }
}

impl MicroBatch {
    /// Tokens of whole sequences of `seq`.
    pub(crate) fn tokens(&self, seq: usize) -> Result<usize, String> {
        let (sequences, tokens) = (self.sequences, self.sequences * seq);
        match tokens > 0 && tokens.is_multiple_of(128) {
            true => Ok(tokens),
            false => Err(format!(
                "micro-batches of {sequences} sequences of {seq} tokens: a GPU takes a multiple of 128 tokens at a time"
            )),
        }
    }
}

/// What places come to: each that is lent counts once.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// Whether blocks run forward again before they run backward.
    pub(crate) again: bool,
    lent: HashSet<Place>,
    pub(crate) memory: ModelMemory,
}

impl Ledger {
    pub(crate) fn new(again: bool) -> Self {
        Self {
            again,
            ..Self::default()
        }
    }

    /// Whether all who ask for `place` have the same buffer.
    pub(crate) fn is_shared(&self, place: &Place) -> bool {
        match place.stays {
            Stays::Own | Stays::Workspace => false,
            Stays::Kept => self.again,
            Stays::Lent => true,
        }
    }

    /// Counts a buffer.
    pub(crate) fn add(&mut self, place: Place) {
        if self.is_shared(&place) && !self.lent.insert(place) {
            return;
        }
        let ModelMemory {
            activations,
            in_turn,
            workspaces,
        } = &mut self.memory;
        let sum = match place.stays {
            Stays::Own | Stays::Kept => activations,
            Stays::Lent => in_turn,
            Stays::Workspace => workspaces,
        };
        *sum += place.bytes as u64;
    }

    fn add_all(&mut self, places: impl IntoIterator<Item = Place>) {
        places.into_iter().for_each(|place| self.add(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arch, GptConfig};
    use lowp_format::{AnyRecipe, Code, RecipeOptions};

    fn sizes(arch: Arch) -> Sizes {
        let config = GptConfig {
            dim: 256,
            layers: 3,
            arch,
            ..GptConfig::default()
        };
        config.sizes()
    }

    const BATCH: MicroBatch = MicroBatch {
        sequences: 4,
        first_token: 0,
        cudnn: CudnnPasses::Both,
        agree_amaxes: false,
        prefetch: true,
        recompute: false,
        documents: false,
    };

    fn memory(sizes: &Sizes, recipe: AnyRecipe, batch: &MicroBatch) -> ModelMemory {
        let recipes = vec![recipe; sizes.linears().len()];
        ModelMemory::new(sizes, &recipes, batch, HOPPER).expect("sizes of a GPU")
    }

    /// In bf16 without what is quantized, by hand.
    #[test]
    fn a_model_in_bf16_keeps_what_its_layers_read() {
        let sizes = sizes(Arch::Gpt);
        let bf16 = AnyRecipe::plain(Code::Bf16).expect("a recipe");
        let [tokens, dim, heads, vocab] = [4 * 128, 256, 4, 256];
        // x and x again, h twice, queries, keys and values, what heads see twice, what fc makes, its GELU.
        let values = 2 * tokens * dim * (2 + 2 + 3 + 2 + 4 + 4);
        let sums = 4 * tokens * (2 + 2 + heads);
        // dx, branch and the last x; its statistics; the batch, losses and the head.
        let own = 2 * tokens * dim * 3 + 4 * 2 * tokens;
        let batch = 4 * (3 * tokens + vocab + 1) + 4 * (tokens + 1) + 2 * vocab * dim;
        let found = memory(&sizes, bf16, &BATCH);
        let expected = 3 * (values + sums) + own + batch;
        assert_eq!(found.activations, expected as u64);
        // Logits and their gradient, the last h and dh, dqkv and da, sums for gamma and beta.
        let in_turn = tokens * vocab * 6 + 2 * tokens * dim * (2 + 3 + 4) + 4 * 32 * 2 * dim;
        assert_eq!(found.in_turn, in_turn as u64);
    }

    /// Query, key and value read one input, and gate and up another: each is kept once, as values or as codes.
    #[test]
    fn layers_that_read_the_same_keep_it_once() {
        let sizes = sizes(Arch::Llama(crate::Llama::new(4)));
        let bf16 = AnyRecipe::plain(Code::Bf16).expect("a recipe");
        let mxfp8 = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
        let found = |[attention, mlp]: [AnyRecipe; 2]| {
            let block = [bf16, attention, bf16, bf16, bf16, mlp, bf16];
            let recipes = block.repeat(sizes.layers);
            let memory = ModelMemory::new(&sizes, &recipes, &BATCH, HOPPER);
            memory.expect("sizes of a GPU").activations
        };
        let elements = (4 * 128 * 256) as u64;
        let codes = sizes.layers as u64 * (elements + elements / 32);
        let alone = found([bf16; 2]);
        assert_eq!(found([mxfp8, bf16]), alone + codes);
        assert_eq!(found([mxfp8; 2]), alone + 2 * codes);
    }

    /// Llama-3 8b's head at 8,192 tokens: logits and their gradients, and that of what the head reads.
    #[test]
    fn a_large_vocabulary_is_cut_over_tokens() {
        let llama = GptConfig {
            dim: 4096,
            layers: 1,
            heads: 32,
            seq: 8192,
            vocab: 128_256,
            arch: Arch::Llama(crate::Llama::new(8)),
        };
        let places = ModelPlaces::new(&llama.sizes(), 8192);
        assert_eq!(places.head_rows, 1024);
        let bytes = places.logits.bytes + places.dlogits.bytes + places.dh.bytes;
        assert_eq!(bytes, 1024 * 128_256 * 6 + 8192 * 4096 * 2);
        assert!(bytes < 1_500_000_000);
        // Of any number of tokens: nearly equal parts, multiples of 128, none longer than `tokens`.
        for tokens in (128..100_000).step_by(128) {
            for vocab in [256, 32_000, 128_256, 1 << 20] {
                let sizes = Sizes {
                    vocab,
                    ..llama.sizes()
                };
                let places = ModelPlaces::new(&sizes, tokens);
                let rows = places.head_rows;
                assert!(rows.is_multiple_of(128) && rows <= tokens);
                assert!(rows == 128 || places.logits.bytes <= (512 << 20) + 128 * 4 * vocab);
                assert!(tokens.div_ceil(rows) * rows - tokens < rows);
            }
        }
    }

    #[test]
    fn recomputed_blocks_keep_one_block() {
        for arch in [Arch::Gpt, Arch::Llama(crate::Llama::new(2))] {
            let sizes = sizes(arch);
            let more = Sizes {
                layers: 2 * sizes.layers,
                ..sizes
            };
            for recipe in AnyRecipe::all() {
                let again = MicroBatch {
                    recompute: true,
                    ..BATCH
                };
                let [few, many] = [sizes, more].map(|s| memory(&s, recipe, &again).total());
                // Each further block keeps the residual stream alone.
                let stream = (4 * 128 * 256 * 2 * sizes.layers) as u64;
                assert_eq!(many - few, stream, "{arch:?} {}", recipe.name());
                assert!(few < memory(&sizes, recipe, &BATCH).total());
            }
        }
    }

    #[test]
    fn attention_by_products_keeps_probabilities() {
        let sizes = sizes(Arch::Gpt);
        let bf16 = AnyRecipe::plain(Code::Bf16).expect("a recipe");
        let products = MicroBatch {
            cudnn: CudnnPasses::None,
            ..BATCH
        };
        let [cudnn, products] = [BATCH, products].map(|batch| memory(&sizes, bf16, &batch));
        let [square, values, rows] = [4 * 4 * 128 * 128, 4 * 128 * 256, 4 * 128 * 4];
        // Of each layer: probabilities in the place of the output and the statistics.
        let more = 3 * (2 * (square - values) - 4 * rows);
        assert_eq!(products.activations, cudnn.activations + more);
        assert!(products.workspaces < cudnn.workspaces);
    }

    #[test]
    fn backward_by_products_makes_probabilities_once_for_all_layers() {
        let sizes = sizes(Arch::Gpt);
        let bf16 = AnyRecipe::plain(Code::Bf16).expect("a recipe");
        let forward = MicroBatch {
            cudnn: CudnnPasses::Forward,
            ..BATCH
        };
        let [both, forward] = [BATCH, forward].map(|batch| memory(&sizes, bf16, &batch));
        let [square, values] = [4 * 4 * 128 * 128, 4 * 128 * 256];
        assert_eq!(forward.activations, both.activations);
        // Scores in f32, probabilities and their gradients; heads of queries, keys, values, the output and two gradients.
        assert_eq!(
            forward.in_turn,
            both.in_turn + (4 + 2 + 2) * square + 2 * 5 * values
        );
        assert!(forward.workspaces < both.workspaces);
    }

    /// What norms of queries and keys read stays, and what they make is in memory that blocks use one after the other.
    #[test]
    fn norms_of_queries_and_keys_keep_what_they_read() {
        let llama = |family| crate::Llama {
            family,
            ..crate::Llama::new(2)
        };
        let [plain, normed] =
            [crate::Family::Llama, crate::Family::Qwen3].map(|f| sizes(Arch::Llama(llama(f))));
        let bf16 = AnyRecipe::plain(Code::Bf16).expect("a recipe");
        let products = MicroBatch {
            cudnn: CudnnPasses::None,
            ..BATCH
        };
        let [tokens, q, kv] = [4 * 128, 256, 2 * 64];
        let rows = (2 * tokens * (q + kv)) as u64;
        let sums = (4 * (tokens * 4 / 256) * 64) as u64;
        for (batch, kept, in_turn) in [(BATCH, 0, rows + sums), (products, 3 * rows, sums)] {
            let [plain, normed] = [plain, normed].map(|sizes| memory(&sizes, bf16, &batch));
            assert_eq!(normed.activations, plain.activations + kept);
            assert_eq!(normed.in_turn, plain.in_turn + in_turn);
            assert_eq!(normed.workspaces, plain.workspaces);
        }
    }

    #[test]
    fn what_a_gpu_cannot_take_is_an_error() {
        let sizes = sizes(Arch::Gpt);
        let bf16 = vec![AnyRecipe::plain(Code::Bf16).expect("a recipe"); 12];
        let of = |sizes: &Sizes, batch| ModelMemory::new(sizes, &bf16, &batch, HOPPER);
        let none = MicroBatch {
            sequences: 0,
            ..BATCH
        };
        let error = of(&sizes, none).expect_err("no tokens");
        assert!(error.contains("multiple of 128 tokens"), "{error}");
        let wide = Sizes {
            vocab: 257,
            ..sizes
        };
        let error = of(&wide, BATCH).expect_err("a vocabulary");
        assert!(error.contains("take 272"), "{error}");
    }
}
