//! The options that `quantize` and `shard` have in common.

use super::names::{FORMS, USAGES};
use super::select::Select;
use crate::one_of::one_of;
use crate::output::shown;
use crate::recipes::{RecipeName, RecipeOptionArgs};
use crate::usage::{UsageError, input_error, of_patterns};
use anyhow::Result;
use lowp_file::Setup;
use lowp_file::dtypes::Dtypes;
use lowp_file::patterns::Pattern;
use lowp_file::select::DEFAULTS;
use lowp_file::select::SetupError;
use lowp_format::spelling::{options_of_files, problem};
use lowp_format::{AnyRecipe, Form, Part, Recipe, ScaleLayout, Shape, Usage};

/// How tensors are quantized, and which.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RecipeArgs {
    /// Recipe of the quantized tensors, as NAME or NAME+MODIFIER; `lowp recipes` describes each
    #[arg(long, value_name = "NAME", value_parser = RecipeName::default())]
    recipe: String,

    /// Orientations to write
    #[arg(long, default_value = "both", value_parser = one_of(USAGES))]
    usage: Usage,

    /// Form of the block scales
    #[arg(long, value_name = "FORM", default_value = "padded", value_parser = one_of(FORMS))]
    scales: Form,

    /// Encode scale of delayed scaling [default: from the amax]
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    delayed_scale: Option<String>,

    /// Quantize only tensors whose name matches; `*` matches any characters, and `.weight` at the end may be left out. May be repeated
    #[arg(long, value_name = "GLOB")]
    tensors: Vec<String>,

    /// Do not quantize tensors whose name matches, even if --tensors matches it. May be repeated
    #[arg(long, value_name = "GLOB")]
    ignore: Vec<String>,

    /// Tensors that share one amax, the largest of theirs, if a scale follows from it. `auto`: layers that inference engines run as one
    /// (query, key and value; gate and up of an MLP or expert). `none`: no tensors. A pattern groups the names that it matches and
    /// that differ only inside its braces: '*.{q,k,v}_proj,*.{gate,up}_proj' [default: auto]
    #[arg(long, value_name = "GLOB,..")]
    amax_group: Vec<String>,

    /// Leave tensors that the recipe cannot take unquantized instead of failing; they are named at the end
    #[arg(long)]
    skip_unsupported: bool,

    #[command(flatten)]
    options: RecipeOptionArgs,
}

impl RecipeArgs {
    pub(super) fn setup(&self) -> Result<Setup> {
        let recipe = self.recipe()?;
        let (usage, form) = (self.usage, self.scales);
        check_form(&recipe, usage, form)?;
        let text = self.delayed_scale.as_deref();
        let setup = Setup {
            recipe,
            usage,
            form,
            // A text that is no number is no scale either.
            delayed_scale: text.map(|text| text.parse().unwrap_or(f32::NAN)),
            dtypes: Dtypes::default(),
        };
        let checked = setup.check().map_err(|error| match error {
            SetupError::NoDelayedScale { recipe } => format!(
                "{recipe} has no delayed scale; leave out --delayed-scale, or choose a recipe with delayed scaling"
            ),
            SetupError::NotAScale { .. } => format!(
                "--delayed-scale {} is not a valid scale; give a positive finite number from 3e-39 to 3.4e38",
                shown(text.unwrap_or_default())
            ),
        });
        checked.map_err(input_error)?;
        Ok(setup)
    }

    /// The recipe with the options that flags or modifiers set.
    fn recipe(&self) -> Result<AnyRecipe> {
        if !self.recipe.contains('+') {
            let recipe = self.options.recipe(&self.recipe, &DEFAULTS);
            return recipe.map_err(|e| {
                let message = self.options.message(&self.recipe, &e);
                input_error(message.unwrap_or_else(|| format!("--recipe: {e}")))
            });
        }
        self.options.reject_beside_modifiers()?;
        let (name, options) = options_of_files(&self.recipe).map_err(UsageError::from)?;
        let recipe = RecipeOptionArgs::from(options).recipe(name, &DEFAULTS);
        recipe.map_err(|e| UsageError::from(problem(name, &e)).into())
    }

    pub(super) fn select(&self) -> Result<Select> {
        Ok(Select {
            tensors: patterns("--tensors", &self.tensors)?,
            ignored: patterns("--ignore", &self.ignore)?,
            amax_groups: self.amax_group.clone(),
            skip_unsupported: self.skip_unsupported,
        })
    }
}

/// Checks that the block scales of `recipe` that serve `usage` have `form`. A recipe without block scales has nothing that
/// would: scales of tensors and of lines are the same numbers in every form.
fn check_form(recipe: &AnyRecipe, usage: Usage, form: Form) -> Result<()> {
    let specs = recipe.buffers(usage);
    let scales = || specs.iter().filter(|s| s.key.part == Part::BlockScale);
    let has = |form: Form| {
        scales().all(|spec| {
            let mut served = (spec.key.usage & usage).orientations();
            served.all(|o| ScaleLayout::new(spec, Shape::new(0, 0), o, form).is_ok())
        })
    };
    if has(form) {
        return Ok(());
    }
    let codes: Vec<String> = scales().map(|spec| spec.code.to_string()).collect();
    let others: Vec<&str> = Form::ALL
        .into_iter()
        .filter(|form| has(*form))
        .map(Form::name)
        .collect();
    Err(input_error(format!(
        "--scales {}: {} has {} block scales, which do not have this form (docs/scale-layouts.md); give --scales {}",
        form.name(),
        recipe.name(),
        codes.first().map_or("no", String::as_str),
        others.join(" or ")
    )))
}

fn patterns(option: &str, texts: &[String]) -> Result<Vec<Pattern>> {
    let patterns: Result<_, _> = texts.iter().map(|text| Pattern::new(text)).collect();
    Ok(patterns.map_err(of_patterns(option))?)
}

/// A recipe that examples in help texts name: the last of the list.
pub(super) fn example() -> &'static str {
    AnyRecipe::names().last().copied().unwrap_or("NAME")
}
