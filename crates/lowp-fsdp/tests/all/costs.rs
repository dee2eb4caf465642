//! Plans by themselves: wrong arguments are an error with the numbers, and no panic; what communicators stage.

use lowp_comm::{GradWire, Mesh};
use lowp_format::{AnyRecipe, RecipeOptions, ReshardAfterForward};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{LinearSpec, VarPlace, VarSpec, VarUse};
use lowp_shard::Init;

fn recipe() -> AnyRecipe {
    AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe")
}

fn shapes() -> ModelShapes {
    let mut shapes = ModelShapes::default();
    shapes.linear(0, "layer".to_owned(), 64, 32);
    shapes.vector(8);
    shapes
}

/// Why there is no plan of `shapes`.
fn refused(shapes: &ModelShapes, recipes: &[AnyRecipe], config: CostConfig) -> String {
    let costs = Costs::new(shapes, recipes, "mxfp8", &config, None);
    costs.map(drop).expect_err("no plan").to_string()
}

#[test]
fn a_config_that_no_run_has_is_refused() {
    let mesh = |replicate, shard| Mesh { replicate, shard };
    let default = CostConfig::default();
    let of = |mesh| CostConfig { mesh, ..default };
    for (config, message) in [
        (
            CostConfig {
                accumulate: 0,
                ..default
            },
            "accumulate is 0; give a number from 1 to 65536",
        ),
        (
            CostConfig {
                accumulate: usize::MAX,
                ..default
            },
            "accumulate is 18446744073709551615; give a number from 1 to 65536",
        ),
        (
            CostConfig {
                per_node: 0,
                ..default
            },
            "per_node is 0; give a number from 1 to 131072",
        ),
        (
            of(mesh(0, 2)),
            "the mesh's number of replicas is 0; give a number from 1 to 131072",
        ),
        (
            of(mesh(2, 0)),
            "the mesh's number of shards is 0; give a number from 1 to 131072",
        ),
        (
            of(mesh(1 << 17, 2)),
            "131072x2 ranks; a plan is made for at most 131072",
        ),
    ] {
        assert_eq!(refused(&shapes(), &[recipe()], config), message);
    }
    for reshard in [0, 3, 16].map(ReshardAfterForward::Group) {
        let config = CostConfig {
            reshard,
            ..of(mesh(1, 8))
        };
        let error = refused(&shapes(), &[recipe()], config);
        assert!(error.contains("8"), "{error}");
    }
    let most = CostConfig {
        accumulate: 1 << 16,
        ..of(mesh(1 << 16, 2))
    };
    Costs::new(&shapes(), &[recipe()], "mxfp8", &most, None).expect("a plan");
}

#[test]
fn shapes_that_no_model_has_are_refused() {
    let config = CostConfig::default();
    let mut large = shapes();
    large.linear(0, "large".to_owned(), usize::MAX, 2);
    let error = refused(&large, &[recipe(); 2], config);
    assert!(
        error.starts_with("large is 18446744073709551615x2: "),
        "{error}"
    );
    let mut large = shapes();
    large.vector(1 << 47);
    large.vector(1 << 47);
    large.vector(1 << 47);
    let error = refused(&large, &[recipe()], config);
    assert_eq!(
        error,
        "422212465068040 parameters; a plan is made for at most 281474976710656"
    );
    let error = refused(&shapes(), &[recipe(); 2], config);
    assert_eq!(error, "2 recipes for 1 linear layers; give one for each");
}

/// The plan of a model and the model itself take the same variables.
#[test]
fn variables_are_those_of_a_model() {
    let of = |shape: &[usize]| -> Result<ModelShapes, String> {
        let var = VarSpec {
            name: "odd".to_owned(),
            shape: shape.to_vec(),
            init: Init::Constant(0.0),
            decay: false,
            used: VarUse::Throughout,
        };
        let linears = [LinearSpec::new("layer", 64, 32, Init::Normal(0.1))];
        ModelShapes::of_specs(&linears, &[var]).map_err(|error| error.to_string())
    };
    let shapes = of(&[3, 4]).expect("shapes");
    assert_eq!(
        (shapes.vars[0].shape.rows, shapes.vars[0].shape.cols),
        (3, 4)
    );
    let shapes = of(&[3]).expect("shapes");
    assert_eq!(
        (shapes.vars[0].shape.rows, shapes.vars[0].shape.cols),
        (1, 3)
    );
    for shape in [&[2, 3, 4][..], &[], &[usize::MAX, usize::MAX]] {
        let error = of(shape).expect_err("no variable");
        assert!(error.starts_with("variable 'odd'"), "{error}");
    }
}

/// Buckets are staged by two communicators of ranks that send them, each in memory for its largest.
#[test]
fn each_communicator_stages_its_own_buckets() {
    let staging = |rows: &[usize], shard, wire| {
        let mut shapes = ModelShapes::default();
        for (number, &rows) in rows.iter().enumerate() {
            shapes.linear(number, number.to_string(), rows, 4096);
        }
        let config = CostConfig {
            mesh: Mesh::sharded(shard),
            vars: VarPlace::Backend,
            grad_wire: wire,
            ..CostConfig::default()
        };
        let recipes = vec![recipe(); rows.len()];
        let costs = Costs::new(&shapes, &recipes, "mxfp8", &config, None);
        costs.expect("a plan").staging
    };
    // A bucket each.
    let (long, short) = (8192, 4096);
    assert_eq!(4 * long * 4096, VarPlace::Backend.grad_bucket());
    for (shard, lens) in [(1, 1), (4, 2)] {
        let of = |rows: &[usize]| staging(rows, shard, GradWire::Bf16);
        // Of each gradient what is sent, and what arrives.
        let [one_long, one_short] = [long, short].map(|rows| (lens * 2 * rows * 4096) as u128);
        assert_eq!(of(&[long]), one_long);
        let two = |a: u128, b: u128| if shard > 1 { a + b } else { a.max(b) };
        assert_eq!(of(&[long, long]), two(one_long, one_long));
        assert_eq!(of(&[long, short]), two(one_long, one_short));
        assert_eq!(of(&[short, long, long]), two(one_long, one_long));
        assert_eq!(of(&[long; 5]), of(&[long; 2]));
        assert_eq!(staging(&[long; 2], shard, GradWire::F32), 0);
    }
}
