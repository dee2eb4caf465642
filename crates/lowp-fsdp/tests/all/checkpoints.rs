//! What a rank reads of a checkpoint: its own file from begin to end, and what all ranks have from the first one's.

use std::path::Path;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, Reads, Saver};
use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, RecipeOptions};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, SavedModel, ShardedModel, VarSpec, VarUse};
use lowp_kernels::Cpu;
use lowp_optim::{Group, Rule, StateName};
use lowp_shard::Init;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// Saves a model of `world` ranks to `folder`, or loads it from there; what each rank read, and elements of its weights. The weights are one
/// block, or each is one.
fn ranks(world: usize, folder: &Path, load: bool, one_block: bool) -> Vec<(Reads, usize)> {
    let ended = ranks_by([Rule::AdamW; 2], world, folder, load, one_block);
    ended.expect("ranks that work")
}

/// The same of a model whose weights and variables these rules update.
fn ranks_by(
    [rule, of_vars]: [Rule; 2],
    world: usize,
    folder: &Path,
    load: bool,
    one_block: bool,
) -> Result<Vec<(Reads, usize)>, String> {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
    let recipe = |_: &LinearSpec| recipe;
    let linear = |n| LinearSpec {
        block: if one_block { 0 } else { n },
        ..LinearSpec::new(format!("layer{n}"), 256, 64, Init::Normal(0.1))
    };
    let linears: Vec<_> = (0..12).map(linear).collect();
    let vars = [VarSpec {
        name: "table".to_owned(),
        shape: vec![64, 16],
        init: Init::Constant(1.0),
        decay: false,
        used: VarUse::First,
    }];
    let ended = run_ranks(&Cpu, world, PATIENCE, |_, comm| {
        let mesh = MeshComm::new(Mesh::sharded(world), comm.clone())?;
        let options = ModelOptions {
            group: Group::of(rule),
            var_group: Some(Group::of(of_vars)),
            ..ModelOptions::default()
        };
        if load {
            let checkpoint = Checkpoint::latest(folder).expect("a checkpoint");
            let about = checkpoint.about();
            let saved = SavedModel {
                checkpoint: &checkpoint,
                weights: &about["weights"],
                scales: &about["scales"],
            };
            let model = ShardedModel::load(&Cpu, &mesh, recipe, &linears, &vars, options, saved)?;
            assert_eq!(model.recast(), 0);
            let ranges = model
                .weights()
                .map(|weight| &weight.element_ranges()[comm.rank()]);
            let owned = ranges.map(|range| range.len()).sum();
            assert_eq!(
                model.weights().all(|weight| weight.tiles().are_rows()),
                one_block
            );
            return Ok((checkpoint.reads(), owned));
        }
        let mut model = ShardedModel::new(&Cpu, &mesh, recipe, &linears, &vars, options)?;
        let about = json!({ "weights": model.about(), "scales": model.about_scales()? });
        let mut saver =
            Saver::new(comm.control().split(0, comm.rank())?, folder, None).expect("a folder");
        saver.start(1, model.pieces()?, about).expect("a start");
        saver.finish().expect("a checkpoint");
        Ok::<_, ModelError>((Reads::default(), 0))
    });
    ended.map_err(|error| error.to_string())
}

/// A model goes on by a rule that keeps what the checkpoint has.
#[test]
fn states_of_another_rule_are_an_error() {
    // Variables have a rule of the same states.
    let both = |rule: Rule| match rule.is_of_matrices() {
        true => [rule, Rule::SgdMomentum],
        false => [rule; 2],
    };
    for before in Rule::ALL {
        let folder = tempfile::tempdir().expect("a folder");
        ranks_by(both(before), 1, folder.path(), false, true).expect("a checkpoint");
        for after in Rule::ALL {
            let loaded = ranks_by(both(after), 1, folder.path(), true, true);
            if before.states() == after.states() {
                loaded.expect("the same states");
                continue;
            }
            let error = loaded.expect_err("other states");
            let saved = StateName::list(before.states());
            let needed = StateName::list(after.states());
            let all = "13 of 13 parameters";
            for part in [&*saved, &*needed, "'layer0'", after.name(), all] {
                assert!(error.contains(part), "{error}");
            }
        }
    }
}

/// Also where the first parameters have the same ones.
#[test]
fn states_of_another_rule_of_variables_are_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let of_vars = |rule| [Rule::AdamW, rule];
    ranks_by(of_vars(Rule::Lion), 1, folder.path(), false, true).expect("a checkpoint");
    ranks_by(of_vars(Rule::Lion), 2, folder.path(), true, true).expect("the same states");
    let error = ranks_by(of_vars(Rule::AdamW), 2, folder.path(), true, true);
    let error = error.expect_err("other states");
    for part in [
        "exp_avg of 'table'",
        "as lion keeps it",
        "1 of 13 parameters",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn files_are_read_from_begin_to_end() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(4, folder.path(), false, true);
    for (rank, (reads, _)) in ranks(4, folder.path(), true, true).into_iter().enumerate() {
        let Reads {
            opens,
            bytes,
            seeks,
            ..
        } = reads;
        assert!(opens <= 2, "rank {rank} opened {opens} files");
        // To its masters, to the counts of the first rank, and to its codes after those.
        assert!(seeks <= 3, "rank {rank} read in {seeks} places");
        let weights = 12 * 256 * 64 / 4;
        // Masters and moments, codes of both orientations and a scale for each 32 of them.
        let own = weights * 12 + weights * 2 + weights * 2 / 32 + 64 * 16 / 4 * 12 + 16;
        assert_eq!(bytes, own, "rank {rank}");
    }
    for world in [3, 8, 1] {
        for (rank, (reads, _)) in ranks(world, folder.path(), true, true)
            .into_iter()
            .enumerate()
        {
            // Of three ranks each owns whole weights, of each of which all four had rows.
            let most = match world {
                3 => 4,
                _ => 4_usize.div_ceil(world) + 1,
            };
            assert!(
                reads.opens <= most.min(4),
                "{world} ranks: {rank}: {reads:?}"
            );
        }
    }
}

/// As many ranks read of tiles what they saved.
#[test]
fn tiles_are_read_as_they_are_owned() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(7, folder.path(), false, false);
    for (rank, (reads, owned)) in ranks(7, folder.path(), true, false).into_iter().enumerate() {
        assert!(reads.opens <= 2, "rank {rank}: {reads:?}");
        assert!(reads.seeks <= 3, "rank {rank}: {reads:?}");
        // Of the table all but the last have ten rows.
        let table = 16 * 10.min(64 - 10 * rank);
        let own = owned * 12 + owned * 2 + owned * 2 / 32 + table * 12 + 16;
        assert_eq!(reads.bytes, own, "rank {rank}");
    }
}
