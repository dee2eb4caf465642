//! Golden vectors of the optimizer: AdamW and L2 with the FMAs of docs/numerics.md 12.2, and the
//! delayed-FP8 fused update.

use lowp_comm::LocalComm;
use lowp_format::Recipe;
use lowp_format::{AnyRecipe, Fp8Format, QuantizedTensor, RecipeOptions, Role, Shape, Usage};
use lowp_kernels::{Backend, Cpu, EncodeJob, GroupScalars, Rule, Slot, UpdateAmax, UpdateJob};
use lowp_kernels::{Source, StepScalars, TensorInput, Work};
use lowp_optim::{Group, OptimizerBuilder, ParamSpec, StepOptions};
use lowp_shard::targets;
use lowp_tests::golden::{Golden, first_difference};

fn group(golden: &Golden, rule: Rule) -> Group {
    let number = |key: &str| golden.number(key) as f32;
    Group {
        lr: number("lr"),
        betas: (number("beta1"), number("beta2")),
        eps: number("eps"),
        weight_decay: number("weight_decay"),
        rule,
        bias_correction: true,
    }
}

/// What no step of lowp gives: AdamW and L2 without the FMAs of docs/numerics.md 12.2, and masters split into bfloat16
/// and a remainder.
const OTHERS: [&str; 3] = ["adamw.", "l2.", "remainder."];

#[test]
fn every_step() {
    let golden = Golden::open("adam");
    three_steps_of_each_rule(&golden);
    fused_delayed_fp8(&golden);
    let others = |name: &String| OTHERS.iter().any(|other| name.starts_with(other));
    let (others, unread): (Vec<_>, Vec<_>) = golden.unread().into_iter().partition(others);
    assert_eq!((others.len(), &unread[..]), (29, &[][..]));
}

fn three_steps_of_each_rule(golden: &Golden) {
    let cpu = Cpu;
    for (name, rule) in [("adamw_fma", Rule::AdamW), ("l2_fma", Rule::AdamL2)] {
        let p0 = golden.f32(&format!("{name}.p0"));
        let shape = Shape::new(1, p0.len());
        let recipe = AnyRecipe::from_name("fp32", &RecipeOptions::default()).expect("f32");
        let tensor =
            QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| cpu.alloc::<u8>(n)).unwrap();
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&cpu));
        let group = builder.group(group(golden, rule));
        let id = builder
            .param(&tensor, ParamSpec::new("p", group, p0))
            .unwrap();
        let mut optimizer = builder.build().unwrap();
        for step in 1..=3 {
            let grad = golden.f32(&format!("{name}.g{step}"));
            optimizer.set_grad(id, &grad).unwrap();
            let report = optimizer.step(&StepOptions::default()).unwrap();
            assert!(report.wait().unwrap().applied);
            let expected = golden.f32(&format!("{name}.p{step}"));
            assert_eq!(
                first_difference(&optimizer.master(id).unwrap(), &expected),
                None,
                "{name} p{step}"
            );
            let states = optimizer.states(id).unwrap();
            for (found, part) in states.iter().zip(["m", "v"]) {
                let expected = golden.f32(&format!("{name}.{part}{step}"));
                assert_eq!(
                    first_difference(found, &expected),
                    None,
                    "{name} {part}{step}"
                );
            }
        }
    }
}

fn fused_delayed_fp8(golden: &Golden) {
    let cpu = Cpu;
    let options = RecipeOptions::default().with("format", Fp8Format::E4M3);
    let recipe = AnyRecipe::from_name("fp8-delayed", &options).unwrap();
    let p0 = golden.f32("fp8.p0");
    let shape = Shape::new(1, p0.len());
    let usage = Usage::ROWWISE;
    let tensor = QuantizedTensor::new(recipe, shape, usage, |_, n| cpu.alloc::<u8>(n)).unwrap();
    let master = cpu.upload(&p0).unwrap();
    let zeros = || cpu.alloc::<f32>(p0.len()).unwrap();
    let (exp_avg, exp_avg_sq) = (zeros(), zeros());
    let amax = cpu.upload(&golden.f32("fp8.amax_in")).unwrap();
    let scale = cpu.upload(&golden.f32("fp8.scale")).unwrap();
    let known = Some(TensorInput::Known(Slot {
        buffer: scale,
        index: 0,
    }));
    let job = UpdateJob {
        master: Source::F32(master.clone()).into(),
        states: vec![
            Source::F32(exp_avg.clone()).into(),
            Source::F32(exp_avg_sq.clone()).into(),
        ],
        grad: Source::F32(cpu.upload(&golden.f32("fp8.g")).unwrap()),
        group: 0,
        random: None,
        rule: Rule::AdamW,
        source_rounding: recipe.source_rounding(),
        amax: Some(UpdateAmax {
            shape,
            out: amax.clone(),
            tensor: Some(0),
            lines: [None; 2],
        }),
        encode: Some(Box::new(EncodeJob {
            shape,
            kernels: recipe.quantizers(Role::Weight).kernels(),
            source: Source::F32(master.clone()),
            source_rounding: recipe.source_rounding(),
            tensor: [known.clone(), known],
            targets: targets(&tensor),
            stochastic: None,
        })),
    };
    let plan = cpu.plan(Work::Update(vec![job])).unwrap();
    let adam: GroupScalars = group(golden, Rule::AdamW).scalars(1, 1.0);
    let scalars = StepScalars {
        groups: vec![adam],
        ..StepScalars::default()
    };
    cpu.run(&plan, &scalars).unwrap();
    for (found, name) in [
        (cpu.download(&master).unwrap(), "fp8.out_p"),
        (cpu.download(&exp_avg).unwrap(), "fp8.out_m"),
        (cpu.download(&exp_avg_sq).unwrap(), "fp8.out_v"),
        (cpu.download(&amax).unwrap(), "fp8.out_amax"),
    ] {
        assert_eq!(first_difference(&found, &golden.f32(name)), None, "{name}");
    }
    let bytes = |i: usize| cpu.download(&tensor.buffers()[i].storage).unwrap();
    assert_eq!(bytes(0), golden.bytes("fp8.out_p_fp8"));
    assert_eq!(bytes(1), golden.bytes("fp8.out_scale_inv"));
}
