//! `lowp quantize`: a model with its matrices in a low-precision recipe.

use super::args::{RecipeArgs, Setup, example};
use super::bands::{Bands, Cast};
use super::fields::{self, Field, worked};
use super::flat::{Flat, FlatCuts};
use super::groups::{Amaxes, Groups};
use super::input_error::file_error;
use super::interchange::hub::Hub;
use super::interchange::shards::{Group, Weights};
use super::meta::{self, Text};
use super::model::{Model, Tensor};
use super::names::{DtypesArgs, Named};
use super::options::Options;
use super::out::OutArgs;
use super::pack::Packed;
use super::progress::Progress;
use super::select::{Choice, Matrix};
use super::source::load;
use super::summary::{Summary, Verbosity};
use super::write::{Item, ItemSource, Parts};
use crate::device::{Device, OnDevice};
use crate::output::shown;
use anyhow::Result;
use lowp_format::{Recipe, Usage};
use lowp_kernels::Backend;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Quantize the matrices of a safetensors model
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp quantize model.safetensors -o q.safetensors --recipe {recipe}
  lowp quantize model-folder -o quantized --recipe {recipe} --keep-unfit --max-shard-size 2GB
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --tensors '*.weight'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --ignore 'lm_head*'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --flat-cuts 1000,5001

A tensor T of two or more dimensions (F32, BF16, F16; leading ones flatten to rows) becomes
T.rowwise_data, T.rowwise_scale_inv, T.columnwise_data, T.columnwise_scale_inv and, where the
recipe looks at the tensor's amax, T.amax (of rows: T.amax, of columns: T.amax_columnwise). FP8
codes are E4M3 unless --format says otherwise. Others pass through unchanged, integers of any shape
among them. The file's metadata say under lowp.tensor.T what T was and how it was quantized.

A file that is replaced keeps its permissions; its owner is who runs the command.", recipe = example()))]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a folder as Hugging Face keeps models
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    /// Where the cast runs: `cpu`, `cuda` or `cuda:N`. The bytes are the same
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    /// Cast as ranks of ZeRO-1 do, which cut the flattened elements of every tensor at these offsets, anywhere: the
    /// same bytes. Offsets beyond the end of a tensor leave the later ranks none of it
    #[arg(long, value_name = "A,B,C", value_delimiter = ',')]
    flat_cuts: Vec<usize>,

    #[command(flatten)]
    recipe: RecipeArgs,

    #[command(flatten)]
    verbosity: Verbosity,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or taken, or an output that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    args.device.run(args)
}

impl OnDevice for &Args {
    type Out = ();

    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let setup = Setup {
            dtypes: self.dtypes.dtypes,
            ..self.recipe.setup()?
        };
        let select = self.recipe.select()?;
        let cuts = FlatCuts::new(&self.flat_cuts)?;
        let summary = Summary::begin(self.verbosity);
        let Hub { model, beside, .. } = Hub::open(&self.input)?;
        let choices = select.choose(&model, &setup)?;
        if let Some(cuts) = &cuts {
            cuts.check(&model, &choices.all)?;
        }
        let out = self.out.open(model.files())?;
        let progress = Progress::new("quantize");
        let weights = weights(backend, &model, &choices.all, cuts, &progress)?;
        weights.check()?;
        let written = out.write([&model], &weights, &progress, |target| {
            beside.copy_all(target)
        })?;
        drop(weights);
        progress.finish();
        if summary.is_told() {
            beside.tell();
        }
        choices.tell("quantized", &summary, model.bytes(), written);
        Ok(())
    }
}

/// What `choices` of `model` become, cast through flat slices where there are `cuts`.
///
/// # Errors
/// Block scales that do not have the form that is asked for.
pub(super) fn weights<'a, B: Backend>(
    backend: &'a B,
    model: &Model,
    choices: &[Choice<'a>],
    cuts: Option<FlatCuts>,
    progress: &'a Progress,
) -> Result<Weights<'a>> {
    let (mut groups, mut sources) = (Vec::new(), Vec::new());
    let members = Groups::of(choices);
    let mut jobs: Vec<(Choice<'a>, Matrix, Vec<Field>)> = Vec::new();
    for &choice in choices {
        let Choice {
            tensor,
            matrix,
            group,
        } = choice;
        let Some(matrix) = matrix else {
            groups.push(Group::of(Item::input(tensor)));
            continue;
        };
        let Matrix { shape, setup } = matrix;
        let specs = setup.recipe.buffers(setup.usage);
        let fields = fields::fields(&setup.recipe, &specs, shape, setup.usage, setup.form)
            .map_err(|e| file_error(model.path(), format!("'{}': {e}", shown(tensor.name))))?;
        let fields = fields::called(&fields, setup.dtypes);
        sources.push(tensor.len());
        let mut text = text(&setup, tensor, setup.usage);
        text.amax_group = members.names(group);
        let text = (meta::key(tensor.name), serde_json::to_string(&text)?);
        groups.push(Group {
            items: made_items(jobs.len(), tensor.name, &fields),
            metadata: BTreeMap::from([text]),
        });
        jobs.push((choice, matrix, fields));
    }
    let (amaxes, memory) = (Amaxes::default(), Rc::default());
    let make = Box::new(move |job: usize| {
        let (Choice { tensor, group, .. }, matrix, fields) = &jobs[job];
        let Matrix { shape, setup } = *matrix;
        let recipe = setup.recipe;
        let whole = |tensor: &Tensor<'_>| Ok(0..tensor.shape.iter().product());
        let shared = amaxes.of(backend, &recipe, (&members, *group), whole)?;
        let fields = fields.clone();
        let Some(cuts) = &cuts else {
            let cast = Cast {
                backend,
                tensor: *tensor,
                matrix: *matrix,
                fields,
                progress,
            };
            let bands = Bands::new(cast, shared, &memory)?;
            return Ok(Box::new(bands) as Box<dyn Parts>);
        };
        let specs = setup.recipe.buffers(setup.usage);
        let flat = Flat {
            recipe,
            shape: worked([shape; 2], &specs),
            specs: &specs,
            delayed_scale: setup.delayed_scale,
            shared,
        };
        let load = |range| load(backend, tensor, range, progress);
        let (tensor, amax) = cuts.cast(backend, &flat, load)?;
        Ok(Box::new(Packed {
            backend: backend.clone(),
            tensor: Arc::new(tensor),
            amax,
            fields,
        }) as Box<dyn Parts>)
    });
    Ok(Weights {
        groups,
        metadata: copied_metadata(model),
        make,
        sources,
    })
}

/// The items of one job's fields.
pub(super) fn made_items<'a>(job: usize, name: &str, fields: &[Field]) -> Vec<Item<'a>> {
    let item = |(part, field): (usize, &Field)| Item {
        name: field.name(name),
        dtype: field.dtype,
        shape: field.shape.clone(),
        bytes: field.bytes(),
        source: ItemSource::Made { job, part },
    };
    fields.iter().enumerate().map(item).collect()
}

/// The metadata of the input that are not about quantized tensors, and the version of ours.
pub(super) fn copied_metadata(model: &Model) -> BTreeMap<String, String> {
    let foreign = model
        .metadata()
        .iter()
        .filter(|(key, _)| !meta::is_ours(key));
    let ours = (meta::FORMAT_KEY.to_owned(), meta::FORMAT.to_owned());
    foreign
        .map(|(key, value)| (key.clone(), value.clone()))
        .chain([ours])
        .collect()
}

/// What the metadata say of `tensor`, stored for `usage`.
pub(super) fn text(setup: &Setup, tensor: Tensor<'_>, usage: Usage) -> Text {
    Text {
        recipe: setup.recipe.name().to_owned(),
        options: Options::of(&setup.recipe),
        shape: tensor.shape.to_vec(),
        dtype: Named::label(tensor.dtype).to_owned(),
        usage: usage.label().to_owned(),
        scales: Named::label(setup.form).to_owned(),
        delayed_scale: setup.delayed_scale,
        amax_group: None,
        shard: None,
    }
}
