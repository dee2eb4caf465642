//! The bits of trained models, which no change of how they are held may change.

use super::resuming::content;
use super::setup::Setup;
use lowp_format::{AnyRecipe, RecipeOptions};
use lowp_fsdp::Passes;
use lowp_transformer::{Arch, Llama};

/// FNV-1a.
fn digest<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// The digest of the losses and of all tensors of the checkpoint after three steps of two micro-batches.
fn trained(arch: Arch, world: usize) -> u64 {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
    let folder = tempfile::tempdir().expect("a folder");
    let setup = Setup {
        arch,
        passes: Passes {
            micro_batches: 2,
            recompute: world == 2,
        },
        to: Some(folder.path().to_owned()),
        ..Setup::new(recipe, world)
    };
    let (losses, _) = setup.train();
    let mut all: Vec<u8> = losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
    for (name, bytes) in content(folder.path()).1 {
        all.extend(name.as_bytes());
        all.extend(bytes);
    }
    digest(&all)
}

/// Embeddings and heads of their own or in common, over one to five ranks. The sums of products are those of x86-64 with fused
/// multiply-adds.
#[test]
fn losses_and_checkpoints_keep_their_bits() {
    if !std::arch::is_x86_feature_detected!("fma") {
        return;
    }
    let llama = Llama::new(1);
    let tied = Llama {
        tied: true,
        ..llama
    };
    let found = [Arch::Gpt, Arch::Llama(llama), Arch::Llama(tied)]
        .map(|arch| [1, 2, 3, 4, 5].map(|world| trained(arch, world)));
    let expected: [[u64; 5]; 3] = [
        [
            0x6d7c_d8f1_ce19_2630,
            0x68b6_bbb6_b26b_e46d,
            0xc5fa_c361_59fe_f21b,
            0x9b43_edcc_5803_669f,
            0xdd4c_43c5_dcab_0a92,
        ],
        [
            0xd85d_59f2_42b9_7d57,
            0x2348_d136_9361_2d37,
            0xab11_1c65_8af7_e3e1,
            0x8a4f_b99a_d059_1c23,
            0x8557_3dab_6a74_9619,
        ],
        [
            0xe90f_464a_b8c7_2b66,
            0x0395_47ec_abae_0d2d,
            0x9bdd_ae4b_a0fa_a976,
            0xa543_1d19_31f7_22f3,
            0xddbc_a2a8_4563_1188,
        ],
    ];
    assert!(found == expected, "{found:#018x?}");
}
