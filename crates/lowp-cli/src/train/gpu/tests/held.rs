//! What a run holds on a GPU and on its host.

use super::families::{QWEN3, TIED, WINDOW, described};
use super::{Asked, SMALL, asked, gpu, model, run};
use crate::train::planned;

/// A plan is what a run holds, to the byte. What cuDNN 9.28 works in was measured on a Hopper.
#[test]
fn a_run_holds_what_is_planned() {
    let Some(cuda) = gpu() else { return };
    let capability = lowp_transformer::capability(&cuda).expect("a capability");
    let recipes = lowp_format::AnyRecipe::low_precision().into_iter();
    let recipes = recipes.map(|recipe| lowp_format::Recipe::name(&recipe));
    let mut runs: Vec<String> = recipes.map(|name| format!("--recipe {name}")).collect();
    let others = [
        "--recipe bf16",
        "--recipe fp32 --accumulate 2",
        "--recipe mxfp8 --no-prefetch --optimizer muon --optimizer-state exp_avg=bf16",
        "--recipe mxfp8-2d --optimizer-state exp_avg=bf16,exp_avg_sq=bf16",
        "--recipe fp8-current --optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
        "--recipe nvfp4-2d --sharding zero1 --optimizer moonlight --optimizer-state exp_avg=fp8",
        "--recipe mxfp8-2d --offload-optimizer",
        "--recipe nvfp4-2d --optimizer muon --offload-optimizer --optimizer-state exp_avg=bf16",
        "--recipe fp8-current --recompute",
        "--recipe fp8-current --reshard-after-forward false",
        "--recipe fp8-current --arch llama --kv-heads 2",
        "--recipe mxfp8 --arch llama --recompute",
        "--recipe mxfp8+bf16-forward --keep-bf16 *.qkv",
        "--recipe bf16 --mask-documents",
    ];
    runs.extend(others.map(str::to_owned));
    let [(_folder, qwen3), (_other, window), (_third, tied)] = [QWEN3, WINDOW, TIED].map(described);
    let small = runs.iter().map(|words| format!("{SMALL} {words}"));
    let norms = ["", " --recompute"].map(|more| format!("{qwen3} --recipe mxfp8{more}"));
    let others = [
        format!("{window} --recipe bf16"),
        format!("{tied} --recipe mxfp8 --accumulate 2"),
    ];
    let runs: Vec<String> = small.chain(norms).chain(others).collect();
    for words in runs.iter().flat_map(|words| {
        let ways = [
            "",
            " --no-cudnn",
            " --no-cudnn=backward",
            " --nondeterministic-attention",
        ];
        ways.map(|more| format!("{words}{more}"))
    }) {
        let asked = asked(&format!("{words} --device cuda"));
        let (mut sharded, mut network) = model(&cuda, &asked);
        run(&mut sharded, &mut network, &asked, (2, 0));
        let Asked { args, setup } = &asked;
        let planned = planned::costs(args, setup, &setup.runs[0].name, capability);
        let (costs, planned) = planned.expect("a plan");
        let found = network.memory();
        assert_eq!(found.activations, planned.activations, "{words}");
        assert_eq!(found.in_turn, planned.in_turn, "{words}");
        assert_eq!(found.workspaces, planned.workspaces, "{words}");
        let parameters =
            sharded.parameter_bytes().expect("bytes") + sharded.var_gather_bytes().expect("bytes");
        let host = sharded.host_bytes();
        assert_eq!(u128::from(host), costs.offloaded.bytes_per_rank, "{words}");
        let on_device = u128::from(parameters - host);
        assert_eq!(on_device, costs.on_device(), "{words}");
    }
}
