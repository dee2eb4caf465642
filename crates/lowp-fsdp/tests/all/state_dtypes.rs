//! Masters and states in few bits: on any number of ranks, cut in any way, they are those of one rank, bit for bit.

use lowp_checkpoint::{Block, Checkpoint, Late, Piece};
use lowp_comm::{MeshComm, run_ranks};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Recipe, Shape, Usage};
use lowp_fsdp::{LinearSpec, ModelError, SavedModel, Sharding};
use lowp_kernels::{Cpu, MasterDtype, bf16};
use lowp_optim::Rule;
use lowp_shard::check_flat;

use crate::runs::{Model, PATIENCE, Run, SHAPES, linears, recipe, step, train, values};

/// Blocks of states in fp8 are whole on every rank, whatever the widths of weights are.
#[test]
fn states_in_fp8_are_the_same_on_any_number_of_ranks() {
    const WIDTHS: [&[[usize; 2]]; 3] = [
        &[[64, 33], [7, 5], [48, 96]],
        &[[64, 48], [32, 80], [48, 96]],
        &[[96, 32], [64, 96]],
    ];
    let state = "exp_avg=fp8,exp_avg_sq=fp8".parse().expect("dtypes");
    let mut odd = Vec::new();
    for recipe in AnyRecipe::all().into_iter().map(Variant::from) {
        let takes = |[rows, cols]: &[usize; 2]| recipe.check(Shape::new(*rows, *cols)).is_ok();
        let shapes = WIDTHS.into_iter().find(|shapes| shapes.iter().all(takes));
        let shapes = shapes.expect("shapes of the recipe");
        if shapes == WIDTHS[0] {
            odd.push(recipe.name());
        }
        let of = |ranks| Run {
            shapes,
            state,
            ..Run::new(recipe, ranks)
        };
        let one = train(&of(1), (None, None));
        let worlds = match recipe.name() {
            "nvfp4-2d" | "fp8-current" => Vec::from_iter(2..=12),
            _ => vec![3, 5, 8, 11],
        };
        for ranks in worlds {
            let many = train(&of(ranks), (None, None));
            assert!(
                many.values == one.values,
                "{} on {ranks} ranks",
                recipe.name()
            );
        }
        if check_flat(&recipe, Usage::BOTH).is_ok() {
            let slices = Run {
                sharding: Sharding::Zero1,
                ..of(5)
            };
            let sliced = train(&slices, (None, None));
            assert!(sliced.values == one.values, "{}, slices", recipe.name());
        }
    }
    let by_elements = ["fp32", "bf16", "fp8-delayed", "fp8-current", "fp8-rowwise"];
    assert_eq!(
        odd,
        [&by_elements[..], &["fp8-block", "fp8-block-1d"]].concat()
    );
}

/// An element of a master in bf16 rounds by random bits of its own.
#[test]
fn masters_in_bf16_are_the_same_on_any_number_of_ranks() {
    let adamw = "master=bf16,exp_avg=fp8,exp_avg_sq=fp8";
    for (name, shapes, rule, state) in [
        (
            "fp8-current",
            &[[64, 33], [7, 5], [48, 96]][..],
            Rule::AdamW,
            adamw,
        ),
        (
            "fp8-delayed",
            &[[64, 33], [7, 5]],
            Rule::Lion,
            "master=bf16",
        ),
        (
            "fp8-rowwise",
            &[[64, 48], [40, 80]],
            Rule::SgdNesterov,
            "master=bf16",
        ),
        (
            "nvfp4-2d",
            &[[64, 48], [32, 80]],
            Rule::AdamL2,
            "master=bf16,exp_avg=bf16",
        ),
        ("mxfp8-2d", SHAPES, Rule::AdamW, adamw),
        ("mxfp8", SHAPES, Rule::Muon, "master=bf16"),
        ("fp32", &[[64, 33], [7, 5]], Rule::Sgd, "master=bf16"),
    ] {
        let of = |ranks| Run {
            shapes,
            rule,
            state: state.parse().expect("dtypes"),
            ..Run::new(recipe(name), ranks)
        };
        let one = train(&of(1), (None, None));
        let in_f32 = Run {
            state: state
                .replace("master=bf16", "master=f32")
                .parse()
                .expect("dtypes"),
            ..of(1)
        };
        assert!(train(&in_f32, (None, None)).values != one.values, "{name}");
        for ranks in [2, 3, 5, 9] {
            let many = train(&of(ranks), (None, None));
            assert!(many.values == one.values, "{name} on {ranks} ranks");
        }
        let slices = Run {
            sharding: Sharding::Zero1,
            ..of(5)
        };
        let sliced = train(&slices, (None, None));
        assert!(sliced.values == one.values, "{name}, slices");
    }
}

/// Masters and states of a run, by the names of their tensors.
fn saved(run: &Run) -> Vec<(String, Vec<u32>)> {
    let folder = tempfile::tempdir().expect("a folder");
    train(run, (None, Some(folder.path())));
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    let mut all = Vec::new();
    for layer in linears(run.shapes) {
        let states = run.rule.states().iter().map(|state| state.name());
        for what in ["master"].into_iter().chain(states) {
            let name = format!("{}.{what}", layer.name);
            let shape = checkpoint.info(&name).expect("a tensor").shape;
            let values = checkpoint.read_f32(&name, shape, Block::whole(shape));
            let values = values.expect("values").into_iter();
            all.push((name, values.map(f32::to_bits).collect()));
        }
    }
    all
}

/// Masters of parameters in bf16, alone or beside weights in other recipes, whose masters stay in f32.
#[test]
fn masters_in_two_halves_are_those_in_f32() {
    const ODD: &[[usize; 2]] = &[[64, 33], [7, 5], [48, 96]];
    for (name, kept, shapes, rule, moments) in [
        ("bf16", None, ODD, Rule::AdamW, ""),
        ("bf16", None, ODD, Rule::Lion, ",exp_avg=bf16"),
        (
            "bf16",
            None,
            SHAPES,
            Rule::AdamL2,
            ",exp_avg=fp8,exp_avg_sq=fp8",
        ),
        ("bf16", None, SHAPES, Rule::Muon, ""),
        (
            "mxfp8-2d",
            Some([128, 384]),
            SHAPES,
            Rule::AdamW,
            ",exp_avg=fp8,exp_avg_sq=fp8",
        ),
    ] {
        let of = |master: &str, ranks| Run {
            shapes,
            kept,
            rule,
            state: format!("master={master}{moments}").parse().expect("dtypes"),
            ..Run::new(recipe(name), ranks)
        };
        let expected = saved(&of("f32", 1));
        for ranks in [1, 2, 3] {
            assert!(
                saved(&of("bf16+16", ranks)) == expected,
                "{name} on {ranks} ranks"
            );
        }
        let slices = Run {
            sharding: Sharding::Zero1,
            ..of("bf16+16", 3)
        };
        assert!(saved(&slices) == expected, "{name}, slices");
    }
}

/// The masters of this rank as they are saved, with bits in the place of bytes.
fn masters(model: &mut Model) -> Result<Vec<Piece<Vec<u32>>>, ModelError> {
    let pieces = model.pieces()?.into_iter();
    let masters = pieces.filter(|piece| piece.name.ends_with(".master"));
    let read = |piece: Piece<Late>| {
        let values = piece.dtype.widened(&piece.bytes.wait().expect("bytes"));
        Piece {
            name: piece.name,
            dtype: piece.dtype,
            full: piece.full,
            block: piece.block,
            bytes: values.into_iter().map(f32::to_bits).collect(),
        }
    };
    let masters: Vec<_> = masters.map(read).collect();
    assert_eq!(masters.len(), model.weights().len());
    Ok(masters)
}

/// A checkpoint of masters in f32 goes on with masters in bf16, of which the codes are made, and the other way round.
#[test]
fn masters_of_a_checkpoint_become_those_of_the_model() {
    for name in ["mxfp8", "fp8-delayed", "bf16"] {
        let folder = tempfile::tempdir().expect("a folder");
        let [wide, narrow, halves] = ["f32", "master=bf16", "master=bf16+16"].map(|state| Run {
            state: state.parse().expect("dtypes"),
            ..Run::new(recipe(name), 2)
        });
        // After the step, by the dtypes that values were rounded to; those of wide masters and of halves are the same.
        let mut stepped = Vec::new();
        for (from, to, recast) in [
            (wide, wide, 0),
            (wide, narrow, 4),
            (narrow, wide, 0),
            (narrow, narrow, 0),
            (wide, halves, 0),
            (halves, wide, 0),
            (halves, narrow, 4),
            (narrow, halves, 0),
        ] {
            train(&from, (None, Some(folder.path())));
            let linears = linears(to.shapes);
            let ended = run_ranks(&Cpu, 2, PATIENCE, |_, comm| {
                let mesh = MeshComm::new(to.mesh, comm)?;
                let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
                let about = checkpoint.about();
                let saved = SavedModel {
                    checkpoint: &checkpoint,
                    weights: &about["weights"],
                    scales: &about["scales"],
                };
                let recipe = |spec: &LinearSpec| to.recipe_of(spec);
                let options = to.options();
                let mut model = Model::load(&Cpu, &mesh, recipe, &linears, &[], options, saved)?;
                assert_eq!((model.recast(), model.rounded()), (recast, recast));
                // Masters are those that were saved, and codes are those of the masters, and go on.
                for master in masters(&mut model)? {
                    let saved = checkpoint.read_f32(&master.name, master.full, master.block);
                    let saved = saved.expect("values").into_iter();
                    let saved = saved.map(|x| match to.state.master {
                        MasterDtype::F32 | MasterDtype::Bf16Plus16 => x.to_bits(),
                        MasterDtype::Bf16 => bf16::from_f32(x).to_f32().to_bits(),
                    });
                    assert!(
                        Vec::from_iter(saved) == master.bytes,
                        "{name}: {}",
                        master.name
                    );
                }
                values(&model)?;
                step(&mut model, 2, &to)?;
                values(&model)?;
                masters(&mut model)
            });
            let ended = ended.expect("ranks that work");
            let rounded = [&from, &to].map(|run| run.state.master == MasterDtype::Bf16);
            match stepped.iter().find(|(of, _)| *of == rounded) {
                Some((_, known)) => {
                    assert!(*known == ended, "{name}: {:?} {:?}", from.state, to.state)
                }
                None => stepped.push((rounded, ended)),
            }
        }
    }
}
