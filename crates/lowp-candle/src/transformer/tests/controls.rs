//! Controls of [`Variant`] reach the products that they name, and no other.

use crate::layers;
use candle_core::{Device, Tensor, Var};
use lowp_comm::{LocalComm, Mesh, MeshComm};
use lowp_format::ReshardAfterForward;
use lowp_format::spelling::Variant;
use lowp_fsdp::{Gradients, LinearSpec, ModelOptions, ShardedModel, Sharding, VarPlace};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::Group;
use lowp_shard::{GradBucketOptions, GradParam, Init};
use std::sync::Arc;

/// `y`, `dx` and `dW` of one layer under `text`, as bits.
fn products(text: &str) -> [Vec<u32>; 3] {
    let (tokens, rows, cols) = (64, 96, 32);
    let variant: Variant = text.parse().expect("a variant");
    let cpu = Cpu;
    let comm = Arc::new(LocalComm::solo(&cpu));
    let mesh = MeshComm::new(Mesh::sharded(1), comm).expect("one rank");
    let spec = LinearSpec {
        name: "layer".to_owned(),
        block: 0,
        rows,
        cols,
        init: Init::Normal(0.1),
        amax_group: None,
    };
    let options = ModelOptions {
        sharding: Sharding::Fsdp,
        reshard_after_forward: ReshardAfterForward::Yes,
        grads: GradBucketOptions::default(),
        seed: 1,
        group: Group::default(),
        vars: VarPlace::Host,
        ..ModelOptions::default()
    };
    let model = ShardedModel::new(&cpu, &mesh, |_| variant, &[spec], &[], options);
    let model = model.expect("a model");
    let dw = cpu.alloc::<f32>(rows * cols).expect("room");
    let weight = model.weight(0).expect("a layer");
    let param = GradParam {
        block: None,
        name: "dw".to_owned(),
        ranges: weight.element_ranges().to_vec(),
        out: dw.clone(),
    };
    let gradients = Gradients::new(&cpu, &mesh, vec![param], options.grads);
    let gradients = Arc::new(gradients.expect("a bucket"));
    weight.connect(&gradients, 0).expect("a weight");
    model.begin(0, 0, true).expect("a first pass");
    let values = |number, cols| {
        let values = Init::Normal(1.0).rows(2, number, 0..tokens, cols);
        Var::from_vec(values, (tokens, cols), &Device::Cpu).expect("values")
    };
    let (x, dy) = (values(0, cols), values(1, rows));
    let y = layers(&model, 1)[0].forward(&x).expect("y");
    let sum = (&y * dy.as_tensor()).and_then(|sum| sum.sum_all());
    let gradients = sum.and_then(|sum| sum.backward()).expect("gradients");
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let flat = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1()).expect("values");
    let dx = gradients.get(&x).expect("dx");
    let dw = cpu.download(&dw).expect("dW");
    [bits(flat(&y)), bits(flat(dx)), bits(dw)]
}

/// Each control changes one operand of one product: the other two products keep their bits, and
/// with both operands exact the product is that of f32.
#[test]
fn a_control_changes_one_product() {
    let exact = products("fp32");
    let pairs = [
        ["exact-activations-forward", "exact-weights-forward"],
        ["exact-gradients-dgrad", "exact-weights-dgrad"],
        ["exact-activations-wgrad", "exact-gradients-wgrad"],
    ];
    for recipe in ["fp8-current", "mxfp8", "nvfp4-2d", "nvfp4-2d+no-hadamard"] {
        let all = products(recipe);
        for (changed, pair) in pairs.iter().enumerate() {
            let both = products(&format!("{recipe}+{}+{}", pair[0], pair[1]));
            // The transform of two exact operands cancels but for the rounding of its sums.
            let rotated = changed == 2 && recipe == "nvfp4-2d";
            assert_eq!(
                both[changed] == exact[changed],
                !rotated,
                "{recipe}, {pair:?}"
            );
            for control in pair {
                let one = products(&format!("{recipe}+{control}"));
                for product in 0..3 {
                    let same = one[product] == all[product];
                    let what = format!("{recipe}+{control}, product {product}");
                    assert_eq!(same, product != changed, "{what}");
                }
                assert_ne!(one[changed], exact[changed], "{recipe}+{control}");
            }
        }
    }
}
