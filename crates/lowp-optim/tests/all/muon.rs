//! Muon: the same masters, to the bit, for any cut of the matrices and 1 to 8 ranks, and those of its definition in binary64 nearly.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{Communicator, LocalComm, Mesh, Traffic, run_ranks};
use lowp_format::{AnyRecipe, Philox, QuantizedTensor, Recipe, Shape, ShardTiles, Usage};
use lowp_gemm::CpuProducts;
use lowp_kernels::{Backend, Cpu, CpuBuffer, Quantized};
use lowp_optim::{
    Group, MatrixCosts, MatrixCut, OptimError, OptimizerBuilder, ParamId, ParamSpec, Rule,
    StepOptions,
};
use lowp_shard::ShardError;
use proptest::prelude::*;

use crate::ranks_that_differ::Enqueued;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Wide, tall, square, of one row, of one column, and one that is more work than all others.
const SHAPES: [Shape; 6] = [
    Shape::new(16, 48),
    Shape::new(40, 24),
    Shape::new(16, 16),
    Shape::new(1, 8),
    Shape::new(24, 1),
    Shape::new(64, 56),
];
const RULES: [Rule; 2] = [Rule::Muon, Rule::Moonlight];
const STEPS: u64 = 3;
/// A step whose gradient is not finite.
const SKIPPED: u64 = 2;

/// Whether a matrix has a gradient in a step: but for one, all have.
fn is_present(param: usize, step: u64) -> bool {
    (param, step) != (1, 3)
}

type Comm = Arc<dyn Communicator<Cpu>>;

fn normal(stream: usize, step: u64, len: usize) -> Vec<f32> {
    let random = Philox::new(stream as u64, step);
    (0..len as u64).map(|i| random.normal(i)).collect()
}

fn grad(param: usize, step: u64) -> Vec<f32> {
    let mut grad = normal(param, step, SHAPES[param].elements());
    if step == SKIPPED && param == 1 {
        grad[3] = f32::INFINITY;
    }
    grad
}

fn rule(param: usize) -> Rule {
    RULES[param % 2]
}

/// How a matrix is cut: where ranks begin, in elements, and how wide shard tiles are.
#[derive(Clone, Debug)]
struct Cut {
    ranges: Vec<Range<usize>>,
    tiles: Option<ShardTiles>,
}

impl Cut {
    /// Cuts at `places` of 0 to 1, in multiples of `quantum` elements.
    fn at(shape: Shape, places: &[f64], quantum: usize, tiles: Option<ShardTiles>) -> Self {
        let all = shape.elements();
        let cut = |place: &f64| ((all as f64 * place) as usize / quantum * quantum).min(all);
        let mut ends: Vec<usize> = places.iter().map(cut).collect();
        ends.sort_unstable();
        ends.push(all);
        let starts = std::iter::once(0).chain(ends.clone());
        let ranges = starts.zip(ends).map(|(start, end)| start..end).collect();
        Self { ranges, tiles }
    }

    /// What rank `rank` has of `values`.
    fn own(&self, rank: usize, values: &[f32]) -> Vec<f32> {
        let range = self.ranges[rank].clone();
        match &self.tiles {
            Some(tiles) => tiles.gather(values, range),
            None => values[range].to_vec(),
        }
    }

    fn of(&self, full: Shape) -> MatrixCut {
        let (ranges, tiles) = (self.ranges.clone(), self.tiles);
        MatrixCut {
            full,
            ranges,
            tiles,
        }
    }

    /// The matrix, of what all ranks have.
    fn all(&self, pieces: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
        let values = pieces.flatten().collect::<Vec<f32>>();
        match &self.tiles {
            Some(tiles) => tiles.scatter(&values),
            None => values,
        }
    }
}

fn f32_recipe() -> AnyRecipe {
    AnyRecipe::from_name("fp32", &Default::default()).expect("a recipe")
}

fn tensor(recipe: AnyRecipe, shape: Shape) -> Result<QuantizedTensor<CpuBuffer<u8>>, ShardError> {
    QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| Ok(Cpu.alloc::<u8>(n)?))
}

/// Master and momentum of each matrix.
type State = Vec<[Vec<f32>; 2]>;

/// What a rank has of every matrix after its steps, what the steps sent, and the bytes that they worked in.
type Done = (State, Traffic, usize);

/// Steps of one rank.
#[allow(clippy::result_large_err, reason = "what the library returns")]
fn steps(comm: Comm, mesh: Mesh, cuts: &[Cut]) -> Result<Done, OptimError> {
    let (_, rank) = mesh.coordinates(comm.rank())?;
    let mut builder = OptimizerBuilder::new(Arc::clone(&comm)).mesh(mesh);
    builder = builder.products(Arc::new(CpuProducts { threads: 1 }));
    let groups = RULES.map(|rule| builder.group(Group::of(rule)));
    let mut params: Vec<(ParamId, usize)> = Vec::new();
    for (param, (full, cut)) in SHAPES.into_iter().zip(cuts).enumerate() {
        let own = cut.own(rank, &normal(param, 1000, full.elements()));
        let (len, start) = (own.len(), cut.ranges[rank].start);
        let spec = ParamSpec::new(format!("{param}"), groups[param % 2], own);
        // Slices begin and end anywhere; rows of tiles are rows of a matrix.
        let id = match &cut.tiles {
            Some(tiles) => {
                let cols = tiles.tile().cols;
                builder.param(&tensor(f32_recipe(), Shape::new(len / cols, cols))?, spec)?
            }
            None => builder.flat_param(&tensor(f32_recipe(), full)?, start, spec)?,
        };
        builder.matrix(id, cut.of(full))?;
        params.push((id, param));
    }
    let mut optimizer = builder.build()?;
    let before = comm.traffic();
    for step in 1..=STEPS {
        for &(id, param) in &params {
            match is_present(param, step) {
                true => optimizer.set_grad(id, &cuts[param].own(rank, &grad(param, step)))?,
                false => optimizer.leave_out(id),
            }
        }
        let report = optimizer.step(&StepOptions::default())?.wait()?;
        assert_eq!(report.applied, step != SKIPPED);
    }
    let state = |&(id, _): &(ParamId, usize)| {
        let state = optimizer.state(id)?;
        Ok([state.master, state.states[0].clone()])
    };
    let states = params
        .iter()
        .map(state)
        .collect::<Result<_, OptimError>>()?;
    let sent = comm.traffic().since(before);
    Ok((states, sent, optimizer.matrix_bytes()))
}

/// The matrices of `mesh.shard` ranks from the first replica on.
fn whole(mesh: Mesh, cuts: &[Cut], found: &[State]) -> Vec<State> {
    let replicas = found.chunks(mesh.shard);
    let of = |ranks: &[State]| {
        let param = |param: usize| {
            [0, 1].map(|which| cuts[param].all(ranks.iter().map(|rank| rank[param][which].clone())))
        };
        (0..SHAPES.len()).map(param).collect()
    };
    replicas.map(of).collect()
}

fn bits(state: &State) -> Vec<Vec<u32>> {
    let values = state.iter().flatten();
    values
        .map(|values| values.iter().map(|x| x.to_bits()).collect())
        .collect()
}

/// Of one rank.
fn alone() -> State {
    let cuts = SHAPES.map(|shape| Cut::at(shape, &[], 1, None));
    let comm = LocalComm::solo(&Cpu).into();
    steps(comm, Mesh::sharded(1), &cuts).expect("steps").0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_cut_over_any_ranks_equals_one_rank(
        world in 1usize..=8,
        places in prop::collection::vec(prop::collection::vec(0.0..1.0, 7), SHAPES.len()),
        kinds in prop::collection::vec(0usize..3, SHAPES.len()),
        replicas in 1usize..=2,
    ) {
        let mesh = Mesh { replicate: replicas, shard: world };
        let cuts: Vec<Cut> = SHAPES.into_iter().zip(places).zip(kinds).map(|((shape, places), kind)| {
            let places = &places[..world - 1];
            match kind {
                0 => Cut::at(shape, places, 1, None),
                1 => Cut::at(shape, places, shape.cols, None),
                _ => {
                    let most = shape.cols.div_ceil(3);
                    let tiles = ShardTiles::at_most(&f32_recipe(), shape, Usage::BOTH, most, 1);
                    Cut::at(shape, places, tiles.tile().elements(), Some(tiles))
                }
            }
        }).collect();
        let expected = bits(&alone());
        let found = run_ranks(&Cpu, mesh.world(), TIMEOUT, |_, comm| steps(comm, mesh, &cuts));
        let found = found.expect("steps");
        let states: Vec<State> = found.iter().map(|(state, ..)| state.clone()).collect();
        for state in whole(mesh, &cuts, &states) {
            prop_assert_eq!(&bits(&state), &expected);
        }
        let matrices: Vec<MatrixCut> = cuts.iter().zip(SHAPES).map(|(cut, full)| cut.of(full)).collect();
        let numbers: Vec<usize> = (0..SHAPES.len()).collect();
        let costs = MatrixCosts::new(&matrices, &numbers, world);
        for (number, (_, traffic, bytes)) in found.iter().enumerate() {
            let rank = number % world;
            prop_assert_eq!(*bytes as u128, costs.bytes[rank]);
            // A replica has a communicator of its own.
            if replicas > 1 {
                continue;
            }
            // An element leaves its rank as bf16 and comes back, but where the rank works on its matrix.
            let travels = |&(param, step): &(usize, u64)| {
                is_present(param, step) && costs.owners[param] != rank
            };
            let each = (0..SHAPES.len()).flat_map(|param| (1..=STEPS).map(move |step| (param, step)));
            let sent = each.filter(travels).map(|(param, _)| 4 * cuts[param].ranges[rank].len() as u64);
            prop_assert_eq!(traffic.owned_bytes, sent.sum::<u64>());
        }
    }
}

/// By way of the host, as processes do.
#[test]
fn ranks_without_a_common_device_equal_one_rank() {
    let cuts = SHAPES.map(|shape| Cut::at(shape, &[0.3, 0.3], 1, None));
    let mesh = Mesh::sharded(3);
    let host = |control| -> Comm { Arc::new(lowp_comm::HostComm::new(control, &Cpu)) };
    let comms = lowp_comm::threads(3, TIMEOUT)
        .into_iter()
        .map(host)
        .collect();
    let found = lowp_comm::run_comms(comms, |_, comm| steps(comm, mesh, &cuts)).expect("steps");
    let states: Vec<State> = found.into_iter().map(|(state, ..)| state).collect();
    assert_eq!(bits(&whole(mesh, &cuts, &states)[0]), bits(&alone()));
}

/// The iteration in binary64.
fn newton_schulz(values: &[f64], Shape { rows, cols }: Shape) -> Vec<f64> {
    let norm = values.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = values.iter().map(|x| x / norm).collect();
    let product = |a: &[f64], b: &[f64], [n, m, k]: [usize; 3]| -> Vec<f64> {
        let at = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * m + j]).sum();
        (0..n * m).map(|index| at(index / m, index % m)).collect()
    };
    let transposed = |a: &[f64]| -> Vec<f64> {
        (0..rows * cols)
            .map(|i| a[i % rows * cols + i / rows])
            .collect()
    };
    for _ in 0..5 {
        let gram = product(&x, &transposed(&x), [rows, rows, cols]);
        let square = product(&gram, &gram, [rows; 3]);
        let polynomial = gram
            .iter()
            .zip(&square)
            .map(|(a, aa)| -4.7750 * a + 2.0315 * aa);
        let next = product(&polynomial.collect::<Vec<_>>(), &x, [rows, cols, rows]);
        x = x
            .iter()
            .zip(next)
            .map(|(x, next)| 3.4445 * x + next)
            .collect();
    }
    x
}

/// docs/numerics.md 22.6: the distance to the definition, relative to the length of an update.
#[test]
fn updates_are_nearly_those_in_binary64() {
    let (found, mut worst) = (alone(), 0f64);
    for (param, full) in SHAPES.into_iter().enumerate() {
        let group = Group::of(rule(param));
        let mut momentum = vec![0f64; full.elements()];
        let first: Vec<f64> = normal(param, 1000, full.elements())
            .iter()
            .map(|&x| x.into())
            .collect();
        let mut master = first.clone();
        let (lr, mu, decay) = (
            f64::from(group.lr),
            f64::from(group.betas.0),
            f64::from(group.weight_decay),
        );
        let scale = match rule(param) {
            Rule::Muon => (full.rows as f64 / full.cols as f64).max(1.0).sqrt(),
            _ => 0.2 * (full.rows.max(full.cols) as f64).sqrt(),
        };
        for step in (1..=STEPS).filter(|&step| step != SKIPPED && is_present(param, step)) {
            let grad: Vec<f64> = grad(param, step).iter().map(|&x| x.into()).collect();
            let nesterov = momentum.iter_mut().zip(&grad).map(|(m, g)| {
                *m = mu * *m + g;
                g + mu * *m
            });
            let orthogonal = newton_schulz(&nesterov.collect::<Vec<_>>(), full);
            for (p, o) in master.iter_mut().zip(orthogonal) {
                *p -= lr * (scale * o + decay * *p);
            }
        }
        let found = found[param][0].iter();
        let length = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
        let apart = length(&mut found.zip(&master).map(|(&x, y)| f64::from(x) - y));
        let moved = length(&mut first.iter().zip(&master).map(|(x, y)| x - y));
        worst = worst.max(apart / moved);
        assert!(apart < 0.02 * moved, "{full:?}: {apart} of {moved}");
    }
    // bf16 is seen: a tolerance of nothing would be missed.
    assert!(worst > 1e-5, "{worst}");
}

fn builder() -> OptimizerBuilder<Cpu> {
    let builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    builder.products(Arc::new(CpuProducts { threads: 2 }))
}

/// For every recipe the weights of a step are the masters quantized, and AdamW in the same step is AdamW alone.
#[test]
fn a_step_of_muon_and_adamw_casts_both() {
    const SHAPE: Shape = Shape::new(64, 64);
    for recipe in AnyRecipe::all() {
        let run = |with: bool| {
            let mut builder = builder();
            let muon = builder.group(Group::of(Rule::Muon));
            let adamw = builder.group(Group::default());
            let weights = tensor(recipe, SHAPE)?;
            let values = normal(0, 0, SHAPE.elements());
            let spec = ParamSpec::new("weight", muon, values.clone());
            let id = with.then(|| builder.param(&weights, spec)).transpose()?;
            let head = tensor(recipe, SHAPE)?;
            let other = builder.param(&head, ParamSpec::new("head", adamw, values))?;
            let mut optimizer = builder.build()?;
            for step in 1..3 {
                for id in id.iter().chain([&other]) {
                    optimizer.set_grad(*id, &normal(1, step, SHAPE.elements()))?;
                }
                optimizer.step(&StepOptions::default())?.wait()?;
            }
            let master = id.map(|id| optimizer.master(id)).transpose()?;
            Ok::<_, OptimError>((weights, master, optimizer.master(other)?))
        };
        let (weights, master, head) = run(true).expect("steps");
        assert_eq!(head, run(false).expect("steps").2);
        let master = master.expect("a master");
        // A delayed scale is that of the step before.
        if recipe.name().starts_with("fp8-delayed") {
            continue;
        }
        let expected = Quantized::encode(&Cpu, recipe, SHAPE, &master).expect("codes");
        for (found, expected) in weights.buffers().iter().zip(expected.tensor().buffers()) {
            let [found, expected] = [found, expected].map(|buffer| Cpu.download(&buffer.storage));
            assert_eq!(found, expected, "{}", recipe.name());
        }
    }
}

/// A step leaves a matrix without a gradient as it is, and goes on with it after that.
#[test]
fn a_matrix_without_a_gradient_stays() {
    const SHAPE: Shape = Shape::new(8, 16);
    let mut builder = builder();
    let group = builder.group(Group::of(Rule::Muon));
    let mut ids = Vec::new();
    for name in ["a", "b"] {
        let master = normal(0, 0, SHAPE.elements());
        let weights = tensor(f32_recipe(), SHAPE).expect("room");
        ids.push(
            builder
                .param(&weights, ParamSpec::new(name, group, master))
                .expect("a matrix"),
        );
    }
    let mut optimizer = builder.build().expect("an optimizer");
    let grad = normal(1, 1, SHAPE.elements());
    let mut step = |with: &[bool]| {
        for (&id, with) in ids.iter().zip(with) {
            match with {
                true => optimizer.set_grad(id, &grad).expect("a gradient"),
                false => optimizer.leave_out(id),
            }
        }
        let done = optimizer.step(&StepOptions::default()).expect("a step");
        assert!(done.wait().expect("a report").applied);
        ids.iter()
            .map(|&id| optimizer.state(id).expect("a state"))
            .collect::<Vec<_>>()
    };
    let first = step(&[true, true]);
    let second = step(&[true, false]);
    assert_eq!(first[1], second[1]);
    assert_ne!(first[0], second[0]);
    let third = step(&[true, true]);
    assert_eq!(third[1], second[0]);
    assert!(optimizer.matrix_bytes() > 4 * SHAPE.elements());
}

#[test]
fn a_matrix_with_a_gradient_on_some_ranks_is_an_error() {
    const SHAPE: Shape = Shape::new(8, 16);
    let cut = Cut::at(SHAPE, &[0.5], SHAPE.cols, None);
    for enqueued in [false, true] {
        let failed = run_ranks(&Cpu, 2, TIMEOUT, |rank, comm| {
            let comm: Arc<dyn Communicator<Cpu>> = match enqueued {
                // As on GPUs.
                true => Arc::new(Enqueued(comm)),
                false => comm,
            };
            let mut builder =
                OptimizerBuilder::new(comm).products(Arc::new(CpuProducts { threads: 1 }));
            let group = builder.group(Group::of(Rule::Muon));
            let own = Shape::new(SHAPE.rows / 2, SHAPE.cols);
            let mut ids = Vec::new();
            for name in ["a", "b"] {
                let spec = ParamSpec::new(name, group, vec![0.5; own.elements()]);
                let id = builder.param(&tensor(f32_recipe(), own)?, spec)?;
                builder.matrix(id, cut.of(SHAPE))?;
                ids.push(id);
            }
            let mut optimizer = builder.build()?;
            for number in 0..2 {
                for &id in &ids {
                    optimizer.set_grad(id, &normal(1, number, own.elements()))?;
                }
                if [rank, number as usize] == [1, 1] {
                    optimizer.leave_out(ids[1]);
                }
                optimizer.step(&StepOptions::default())?.wait()?;
            }
            Ok::<_, OptimError>(())
        });
        let error = failed.expect_err("ranks that differ").to_string();
        assert!(error.contains("'b' has a gradient on"), "{error}");
    }
}

#[test]
fn what_cannot_be_made_orthogonal_is_said() {
    const SHAPE: Shape = Shape::new(8, 16);
    let built = |world: usize, products: bool, cut: Option<MatrixCut>, bf16: bool| {
        let failed = run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
            let mut builder = OptimizerBuilder::new(comm);
            if products {
                builder = builder.products(Arc::new(CpuProducts { threads: 1 }));
            }
            let group = builder.group(Group::of(Rule::Moonlight));
            let rows = SHAPE.rows / world;
            let own = Shape::new(rows, SHAPE.cols);
            let mut spec = ParamSpec::new("up", group, vec![0.5; own.elements()]);
            if bf16 {
                spec.state = "momentum_buffer=bf16".parse().expect("dtypes");
            }
            let id = builder.param(&tensor(f32_recipe(), own)?, spec)?;
            if let Some(cut) = &cut {
                builder.matrix(id, cut.clone())?;
            }
            let _ = rank;
            builder.build().map(drop)
        });
        failed.expect_err("a mistake").to_string()
    };
    let cut = |ends: &[usize]| {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let ranges = starts.zip(ends).map(|(start, &end)| start..end).collect();
        Some(MatrixCut {
            full: SHAPE,
            ranges,
            tiles: None,
        })
    };
    for (found, says) in [
        (
            built(1, false, None, false),
            "'up' is in a group of moonlight",
        ),
        (built(1, false, None, false), "give products"),
        (built(1, true, None, true), "keep momentum_buffer in f32"),
        (
            built(2, true, None, false),
            "2 ranks share it; say which elements each has",
        ),
        (built(2, true, cut(&[128]), false), "1 ranges for 2 ranks"),
        (
            built(2, true, cut(&[64, 120]), false),
            "120 elements of 8 x 16",
        ),
        (
            // Of one rank or of the other.
            built(2, true, cut(&[60, 128]), false),
            ", whose master has 64",
        ),
    ] {
        assert!(found.contains(says), "{found}");
    }
}
