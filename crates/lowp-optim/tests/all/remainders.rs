//! Masters in two halves, of which one is the parameter: every step leaves the bits that masters in f32 have, on any ranks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use lowp_comm::{Communicator, LocalComm, run_ranks};
use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::{
    Group, MasterDtype, OptimError, OptimizerBuilder, ParamPlace, ParamSpec, Rule, StateDtype,
    StateDtypes, StepOptions,
};
use lowp_shard::{ShardSpec, ShardedTensor};
use proptest::prelude::*;

const STEPS: u64 = 50;

/// What a parameter is trained by.
#[derive(Clone, Debug)]
struct Run {
    shape: Shape,
    rule: Rule,
    state: StateDtypes,
    first: Vec<f32>,
}

/// Elements of a rank: its master, states, and the bytes of the parameters that it holds.
#[derive(Clone, Debug, PartialEq)]
struct Trained {
    elements: Range<usize>,
    values: Vec<Vec<u32>>,
    codes: Vec<u8>,
}

/// Gradients of a step; of the first elements they are zero.
fn grads(run: &Run, step: u64) -> Vec<f32> {
    let value = |i: usize| match i {
        0..4 => 0.0,
        i => ((i as u64 * 37 + step * 101) % 255) as f32 / 127.0 - 1.0,
    };
    (0..run.shape.elements()).map(value).collect()
}

/// All steps of one rank, with rows, or with a slice of the flattened matrix.
fn train(
    run: &Run,
    comm: Arc<dyn Communicator<Cpu>>,
    slice: Option<Range<usize>>,
) -> Result<Trained, OptimError> {
    let recipe = AnyRecipe::from_name("bf16", &RecipeOptions::default())?;
    let (ranks, rank) = (comm.world_size(), comm.rank());
    let mut builder = OptimizerBuilder::new(comm);
    let group = builder.group(Group {
        lr: 1e-2,
        weight_decay: 0.0,
        ..Group::of(run.rule)
    });
    let rows = ShardSpec::new(&recipe, run.shape, ranks, rank)?;
    let elements = slice.clone().unwrap_or_else(|| rows.elements());
    let spec = ParamSpec {
        state: run.state,
        place: ParamPlace {
            start: elements.start,
            tiles: None,
        },
        ..ParamSpec::new("w", group, run.first[elements.clone()].to_vec())
    };
    let (id, codes) = match slice {
        Some(slice) => {
            let alloc = |_: &_, n| Cpu.alloc::<u8>(n);
            let whole = QuantizedTensor::new(recipe, run.shape, Usage::BOTH, alloc)?;
            let id = builder.flat_param(&whole, slice.start, spec)?;
            (id, whole.buffers()[0].storage.clone())
        }
        None => {
            let shard = ShardedTensor::new(&Cpu, recipe, rows)?;
            let id = builder.param(shard.local(), spec)?;
            (id, shard.local().buffers()[0].storage.clone())
        }
    };
    let mut optimizer = builder.build()?;
    for step in 0..STEPS {
        optimizer.set_grad(id, &grads(run, step)[elements.clone()])?;
        assert!(optimizer.step(&StepOptions::default())?.wait()?.applied);
    }
    let state = optimizer.state(id)?;
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let values = [vec![state.master], state.states].concat();
    Ok(Trained {
        elements,
        values: values.into_iter().map(bits).collect(),
        codes: Cpu.download(&codes)?,
    })
}

/// The parameters of masters in two halves, little endian.
fn parameters(masters: &[u32]) -> Vec<u8> {
    let parameter = |&bits: &u32| match bits & 0xFFFF {
        0x8000 => (bits >> 16) as u16 + 1,
        _ => bf16::from_f32(f32::from_bits(bits)).to_bits(),
    };
    let parameters = masters.iter().map(parameter);
    parameters.flat_map(u16::to_le_bytes).collect()
}

fn runs() -> impl Strategy<Value = Run> {
    let rules = Rule::ALL.into_iter().filter(|rule| !rule.is_of_matrices());
    let rules: Vec<Rule> = rules.collect();
    let states = prop_oneof![
        Just(StateDtype::F32),
        Just(StateDtype::Bf16),
        Just(StateDtype::Fp8)
    ];
    let rule = proptest::sample::select(rules);
    (1usize..9, 1usize..40, rule, states).prop_map(|(rows, cols, rule, dtype)| {
        // Blocks of states are whole in every row and slice.
        let cols = 32 * cols.div_ceil(4);
        let shape = Shape::new(rows, cols);
        let value = |i: usize| match i {
            // Ties, of which every other one has an even neighbour below.
            0..4 => f32::from_bits(0x3F80_8000 + 0x1_0000 * i as u32),
            i => ((i * 97) % 251) as f32 / 125.0 - 1.0,
        };
        Run {
            shape,
            rule,
            state: StateDtypes {
                master: MasterDtype::Bf16Plus16,
                exp_avg: dtype,
                exp_avg_sq: dtype,
                momentum_buffer: dtype,
            },
            first: (0..shape.elements()).map(value).collect(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn halves_of_masters_are_the_masters_in_f32(
        run in runs(), ranks in 1usize..4, flat: bool, cuts in proptest::collection::vec(0.0f64..1.0, 2),
    ) {
        let wide = Run { state: StateDtypes { master: MasterDtype::F32, ..run.state }, ..run.clone() };
        let one = LocalComm::solo(&Cpu).into();
        let expected = train(&wide, one, None).expect("a step");
        let len = run.shape.elements();
        let mut ends: Vec<usize> = cuts[..ranks - 1].iter().map(|x| (x * len as f64) as usize / 32 * 32).collect();
        ends.sort_unstable();
        ends.push(len);
        let starts: Vec<usize> = [0].into_iter().chain(ends.iter().copied()).collect();
        let slice = |rank: usize| flat.then(|| starts[rank]..ends[rank]);
        let trained = run_ranks(&Cpu, ranks, Duration::from_secs(20), |rank, comm| train(&run, comm, slice(rank)));
        for found in trained.expect("ranks that work") {
            let own: Vec<Vec<u32>> = expected.values.iter().map(|all| all[found.elements.clone()].to_vec()).collect();
            prop_assert_eq!(&found.values, &own);
            // Of a slice the rank has the whole weight, which was gathered.
            let held = if flat { &expected.values[0] } else { &own[0] };
            prop_assert_eq!(&found.codes, &parameters(held));
        }
        // Those of masters in f32 are the same but for ties.
        let differ = expected.codes.iter().zip(&parameters(&expected.values[0])).filter(|(a, b)| a != b).count();
        prop_assert!(differ >= 2, "{differ}");
    }
}
