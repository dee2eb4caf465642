//! `lowp plan`: the buffers of one weight and what the ranks exchange of it, from the specs and plans that training runs.

mod json;

use crate::output;
use crate::recipes::{RecipeName, RecipeOptionArgs};
use crate::train::{DEFAULT_RECIPE, Variant, plain_recipe};
use crate::usage::UsageError;
use anyhow::Result;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lowp_format::{
    Code, FormatError, GatherPlan, Phase, PhasePlans, Recipe, ReshardAfterForward, RowCuts, Shape,
    Usage, buffers_table, gather_table, ranks_table,
};

/// Most ranks that a plan is made for.
const MAX_WORLD: usize = 1 << 16;
/// Most elements of a weight, so that no sum of bytes overflows.
const MAX_ELEMENTS: usize = 1 << 48;

/// Print what one weight costs: its buffers, and what the ranks send of it
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp plan --shape 4096x1024 --world-size 8
  lowp plan --recipe {DEFAULT_RECIPE} --shape 4096x1024 --world-size 8 --reshard-after-forward false
  lowp plan --recipe {DEFAULT_RECIPE} --shape 100x64 --world-size 3 --usage rowwise --json

Columns: `entries` and `bytes` are what is stored, sent and saved; `padded` is the layout of
TransformerEngine, `swizzled` that of cuBLASLt operands. A rank stores the buffers that are not
derived, and rows are cut at multiples of their `quantum`. `rank bytes` is what one rank sends of a
buffer, `wire bytes` what all ranks send together."))]
pub(crate) struct Args {
    /// Format of the weight, as NAME or NAME+MODIFIER; `lowp recipes` tells what each is
    #[arg(long, value_name = "NAME", default_value = DEFAULT_RECIPE, value_parser = RecipeName::default())]
    recipe: String,

    /// Rows x columns of the full weight: output x input features
    #[arg(long, value_name = "MxK")]
    shape: Shape,

    /// Number of ranks that the rows are cut for
    #[arg(long, value_name = "N", aliases = ["world", "ranks"])]
    world_size: usize,

    /// What the weight is gathered for: forward needs rowwise, backward columnwise
    #[arg(
        long,
        value_name = "USAGE",
        default_value = "both",
        value_parser = PossibleValuesParser::new(["rowwise", "columnwise", "both"]).map(usage_of)
    )]
    usage: Usage,

    /// Free the gathered weight after forward and gather it again for backward (true), keep it (false), or keep it shared
    /// out in groups of N ranks, which gather it for backward [default: true]
    #[arg(long, value_name = "BOOL|N")]
    reshard_after_forward: Option<ReshardAfterForward>,

    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    options: RecipeOptionArgs,
}

/// Runs the command.
///
/// # Errors
/// Arguments that name no recipe, or a shape or world that the recipe cannot take.
pub(crate) fn main(args: &Args) -> Result<()> {
    let text = if args.recipe.contains('+') {
        args.options.reject_beside_modifiers()?;
        let variant: Variant = args.recipe.parse()?;
        plan(&variant, args)?
    } else {
        let recipe = args.options.recipe(&args.recipe, &[]);
        let recipe = recipe.map_err(|e| match args.options.message(&args.recipe, &e) {
            Some(message) => UsageError::new(message),
            None => e.into(),
        })?;
        plan(&recipe, args)?
    };
    output::print(&text)
}

/// The plan of one weight in `recipe` as text.
fn plan(recipe: &impl Recipe, args: &Args) -> Result<String> {
    let Args {
        shape,
        world_size: world,
        usage,
        ..
    } = *args;
    check(args)?;
    let reshard = args.reshard_after_forward.unwrap_or_default();
    let plans = gathers(recipe, shape, world, usage, reshard).map_err(UsageError::from)?;
    if args.json {
        return json::render(recipe, args, &plans);
    }
    let labelled: Vec<_> = plans
        .iter()
        .map(|(phase, plan)| (phase.name(), plan))
        .collect();
    let buffers = buffers_table(recipe, shape, usage).map_err(UsageError::from)?;
    // The table knows the recipe by its name, without the modifiers.
    let buffers = buffers.strip_prefix(recipe.name()).unwrap_or(&buffers);
    let mut text = format!("{}{buffers}\n{}\n", args.recipe, gather_table(&labelled));
    text += &ranks_table(recipe, usage, &labelled);
    if let Some(bf16) = plain_recipe(Code::Bf16) {
        let stored = bf16.stored(usage);
        let stored: usize = stored.iter().map(|spec| spec.bytes(shape)).sum();
        let plans = gathers(&bf16, shape, world, usage, reshard).map_err(UsageError::from)?;
        let wire: usize = plans.iter().map(|(_, plan)| plan.wire_bytes()).sum();
        text += &format!("\nin bf16: {stored} bytes stored, {wire} on the wire\n");
    }
    Ok(text)
}

/// What the recipe cannot judge.
fn check(args: &Args) -> Result<(), UsageError> {
    let Args {
        shape,
        world_size: world,
        usage,
        ..
    } = *args;
    if shape.elements() == 0 {
        return Err(UsageError::new(format!(
            "--shape {shape} has no elements; both numbers must be at least 1"
        )));
    }
    if shape.elements() > MAX_ELEMENTS {
        return Err(UsageError::new(format!(
            "--shape {shape} has more than {MAX_ELEMENTS} elements"
        )));
    }
    if world > MAX_WORLD {
        return Err(UsageError::new(format!(
            "--world-size {world}: a plan is made for at most {MAX_WORLD} ranks"
        )));
    }
    if usage != Usage::BOTH && args.reshard_after_forward.is_some() {
        return Err(UsageError::new(format!(
            "--reshard-after-forward needs --usage both: with {usage} there is one gather and none to save"
        )));
    }
    Ok(())
}

/// The gathers that `usage` takes in one step, in order.
fn gathers(
    recipe: &impl Recipe,
    full: Shape,
    world: usize,
    usage: Usage,
    reshard: ReshardAfterForward,
) -> Result<Vec<(Phase, GatherPlan)>, FormatError> {
    if usage == Usage::BOTH {
        let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(usage))?;
        let plans = PhasePlans::new(recipe, full, &cuts, reshard)?;
        let of_phase = |phase| (phase, plans.phase(phase).clone());
        return Ok(Phase::ALL.map(of_phase).to_vec());
    }
    let needed = Phase::ALL
        .into_iter()
        .filter(|phase| usage.contains(phase.usage()));
    needed
        .map(|phase| Ok((phase, GatherPlan::new(recipe, full, world, usage)?)))
        .collect()
}

fn usage_of(text: String) -> Usage {
    match text.as_str() {
        "rowwise" => Usage::ROWWISE,
        "columnwise" => Usage::COLUMNWISE,
        _ => Usage::BOTH,
    }
}
