//! `lowp recipes`: what `--recipe` takes: the recipes in words ([`RecipeWords`]), what they store and send ([`PhasePlans`]), and the
//! modifiers ([`spelling::modifiers`]).

mod name;
mod options;
mod products;

pub(crate) use name::RecipeName;
pub(crate) use options::{RecipeOptionArgs, join_switches};

use crate::columns::Columns;
use crate::output;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_file::inspect::Options;
use lowp_format::spelling;
use lowp_format::{AnyRecipe, PhasePlans, Recipe, RecipeWords, RowCuts, Shape, Usage};
use serde::Serialize;
use serde_json::Value;

/// The weight and the ranks that the printed bytes are of.
const SHAPE: Shape = Shape::new(4096, 4096);
const WORLD: usize = 8;

/// List the recipes with their options, and the bytes that each stores and sends
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp recipes
  lowp recipes --json
  lowp recipes --device sm_90

JSON: {\"recipes\": [..], \"modifiers\": [..], \"shape\": [rows, columns], \"world_size\": n}. One entry of
`recipes` has its `name`, a `description`, its `options` with their defaults, and the bytes of each
element of such a weight over that many ranks: `stored`, and `sent` in one step that gathers for
forward and again for backward. One entry of `modifiers` has its `name`, a `description`, and the
`recipes` that it changes.")]
pub(crate) struct Args {
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,

    /// Print which products the layers of `lowp train` run on a device: `cpu`, `cuda`, `cuda:N`, or an architecture such as `sm_90`,
    /// for a GPU that this machine does not have
    #[arg(long, value_name = "NAME", conflicts_with = "json")]
    device: Option<products::On>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    output::print(&match &args.device {
        Some(device) => products::table(device)?,
        None if args.json => json()?,
        None => table()?,
    })
}

fn table() -> Result<String> {
    let mut recipes = Columns::new(
        &["recipe", "elements", "scales", "from", "stored", "sent"],
        &[0, 1, 2, 3],
    );
    let mut options = Columns::new(&["recipe", "options and their defaults"], &[0, 1]);
    for recipe in AnyRecipe::all() {
        let words = RecipeWords::of(&recipe);
        let bytes = Bytes::of(&recipe)?;
        recipes.own_words([
            recipe.name().to_owned(),
            words.elements,
            words.scales.unwrap_or_else(|| "-".to_owned()),
            words.source.unwrap_or_else(|| "-".to_owned()),
            format!("{:.3}", bytes.stored),
            format!("{:.3}", bytes.sent),
        ]);
        let set = Options::of(&recipe);
        let set: Vec<_> = set
            .iter()
            .map(|(name, value)| option(name, value))
            .collect();
        // Few enough for a line.
        for (i, some) in set.chunks(4).enumerate() {
            let name = if i == 0 { recipe.name() } else { "" };
            options.own_words([name.to_owned(), some.join(", ")]);
        }
    }
    let mut modifiers = Columns::new(&["modifier", "what it does", "of"], &[0, 1, 2]);
    for modifier in spelling::modifiers() {
        let takers = modifier.recipes();
        let mut others = AnyRecipe::names();
        others.retain(|name| !takers.contains(name));
        let below = AnyRecipe::low_precision();
        let of = if takers.iter().copied().eq(below.iter().map(Recipe::name)) {
            "all below 16 bits".to_owned()
        } else if others.is_empty() {
            "all".to_owned()
        } else if others.len() == 1 {
            format!("all but {}", others.join(", "))
        } else {
            takers.join(", ")
        };
        modifiers.own_words([format!("+{}", modifier.name), modifier.what, of]);
    }
    Ok(format!(
        "{}`stored` and `sent` are bytes per element of a {SHAPE} weight over {WORLD} ranks, all together; sent in one\n\
         step that gathers for forward and again for backward. `lowp plan` tells them for any weight.\n\n\
         {}`lowp quantize`, `lowp shard` and `lowp plan` set them by flags of these names, --scale-mode even, or by\n\
         modifiers, NAME+even; files have the format e4m3 unless an option says otherwise.\n\n\
         {}A modified recipe is NAME+MODIFIER+MODIFIER. A modifier is a value of an option, the name of one that is on or off,\n\
         OPTION=VALUE, or, of `lowp train` and `lowp plan`, an ablation, which should train worse.\n",
        recipes.render(),
        options.render(),
        modifiers.render()
    ))
}

/// `format=e4m3`.
fn option(name: &str, value: &Value) -> String {
    let value = value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned);
    format!("{name}={value}")
}

/// The document of `--json`.
#[derive(Serialize)]
struct Document {
    recipes: Vec<RecipeRecord>,
    modifiers: Vec<ModifierRecord>,
    shape: [usize; 2],
    world_size: usize,
}

#[derive(Serialize)]
struct RecipeRecord {
    name: &'static str,
    description: String,
    options: Options,
    #[serde(flatten)]
    bytes: Bytes,
}

#[derive(Serialize)]
struct ModifierRecord {
    name: String,
    description: String,
    recipes: Vec<&'static str>,
}

fn json() -> Result<String> {
    let recipe = |recipe: AnyRecipe| {
        Ok(RecipeRecord {
            name: recipe.name(),
            description: RecipeWords::of(&recipe).to_string(),
            options: Options::of(&recipe),
            bytes: Bytes::of(&recipe)?,
        })
    };
    let modifier = |known: spelling::ModifierWords| ModifierRecord {
        recipes: known.recipes(),
        name: known.name,
        description: known.what,
    };
    let document = Document {
        recipes: AnyRecipe::all()
            .into_iter()
            .map(recipe)
            .collect::<Result<_>>()?,
        modifiers: spelling::modifiers().into_iter().map(modifier).collect(),
        shape: [SHAPE.rows, SHAPE.cols],
        world_size: WORLD,
    };
    output::json(&document)
}

/// The names of the modifiers alone, for help texts.
pub(crate) fn modifiers() -> String {
    let names = spelling::modifiers().into_iter();
    let names: Vec<_> = names.map(|known| format!("+{}", known.name)).collect();
    format!(
        "Modifiers: {}, +OPTION=VALUE\n`lowp recipes` describes each.\n",
        names.join(", ")
    )
}

/// Bytes per element of the example weight, all ranks together.
#[derive(Serialize)]
struct Bytes {
    stored: f64,
    /// In one step that gathers for forward and again for backward.
    sent: f64,
}

impl Bytes {
    fn of(recipe: &AnyRecipe) -> Result<Self> {
        let cuts = RowCuts::new(SHAPE.rows, WORLD, recipe.row_quantum(Usage::BOTH))
            .map_err(UsageError::from)?;
        let sent = PhasePlans::new(recipe, SHAPE, &cuts, true)?.wire_bytes();
        let stored = recipe.stored(Usage::BOTH);
        let stored: usize = stored.iter().map(|spec| spec.bytes(SHAPE)).sum();
        let each = |bytes: usize| bytes as f64 / SHAPE.elements() as f64;
        Ok(Self {
            stored: each(stored),
            sent: each(sent),
        })
    }
}
