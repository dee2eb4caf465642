//! Whether two models hold the same, or a file what quantizing a model makes of it, and where they differ first.

use crate::difference::{Byte, Pair};
use crate::dtypes::{Dtypes, Named};
use crate::error::{Context, FileError, Result, file_error, input_error, mend_file};
use crate::fields::{self, Field};
use crate::interchange::hub::Hub;
use crate::meta::{self, Quantized};
use crate::model::{Model, Tensor};
use crate::outputs::{Group, Outputs, bytes};
use crate::progress::Progress;
use crate::quantize;
use crate::remedy::Remedy;
use crate::select::{Choice, Matrix, Setup, reject_quantized};
use crate::source::on_threads;
use crate::text::{dims, shown};
use crate::write::{Item, ItemSource};
use lowp_kernels::Backend;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

pub use crate::difference::Equal;

/// Compares two models byte by byte, and what their metadata say.
///
/// # Errors
/// [`FileError::Differ`] at the first difference, in the order of names; a model that cannot be read, or was changed meanwhile.
pub fn verify(a: &Model, b: &Model, progress: &dyn Progress) -> Result<Equal> {
    let compared = || -> Result<Equal> {
        // Also rejects quantized tensors that lack a part.
        let quantized = [meta::quantized(a)?, meta::quantized(b)?];
        let tensors = b.tensors().map(Item::input).map(Group::of).collect();
        let none = Box::new(|_| Err(input_error("nothing is made")));
        let outputs = Outputs::sorted(tensors, BTreeMap::new(), none);
        let names = [a, b].map(|model| model.path().display().to_string());
        let pair = Pair {
            a: &names[0],
            b: &names[1],
            tensors: &quantized[0],
        };
        let equal = Check::new(a, &outputs, progress).compare(&pair, &pair)?;
        compare_meaning(&pair, &quantized)?;
        Ok(equal)
    };
    a.steady(b.steady(compared()))
}

fn compare_meaning(pair: &Pair<'_>, quantized: &[BTreeMap<String, Quantized>; 2]) -> Result<()> {
    let names: BTreeSet<&String> = quantized.iter().flat_map(BTreeMap::keys).collect();
    for name in names {
        let text = |of: &BTreeMap<String, Quantized>| -> Result<Option<String>> {
            let found = of
                .get(name)
                .map(|tensor| serde_json::to_string(&tensor.text));
            Ok(found.transpose()?)
        };
        let shown = shown(name);
        let lacks = |with: &str, without: &str| {
            FileError::Differ(format!(
                "'{shown}' has the same bytes, but only {with} says what they mean: {without} lacks its metadata; \
                 copy both, or write that file again"
            ))
        };
        match (text(&quantized[0])?, text(&quantized[1])?) {
            (Some(x), Some(y)) if x != y => {
                return Err(FileError::Differ(format!(
                    "'{shown}' has the same bytes and another meaning: {x} in {}, {y} in {}",
                    pair.a, pair.b
                )));
            }
            (Some(_), None) => return Err(lacks(pair.a, pair.b)),
            (None, Some(_)) => return Err(lacks(pair.b, pair.a)),
            _ => {}
        }
    }
    Ok(())
}

/// Quantizes the model at `source` again on `backend`, as the metadata of the file at `quantized` say, and compares the result with it.
/// Returns what was compared, and how many tensors were quantized.
///
/// # Errors
/// [`FileError::Differ`] at the first difference, in the order of names; a model that cannot be read, or was changed meanwhile.
pub fn verify_source<B: Backend>(
    backend: &B,
    quantized: &Path,
    source: &Path,
    progress: &dyn Progress,
) -> Result<(Equal, usize)> {
    let file = Hub::open(quantized)?.model;
    let tensors = meta::quantized(&file)?;
    if let Some(rows) = tensors.values().find(|tensor| tensor.shard.is_some()) {
        return Err(mend_file(
            file.path(),
            format!("it holds one rank's rows of '{}'", shown(&rows.name)),
            Remedy::Unshard,
        ));
    }
    let model = Hub::open(source)?.model;
    reject_quantized(&model)?;
    let [a, b] = [&file, &model].map(|model| model.path().display().to_string());
    let pair = Pair {
        a: &a,
        b: &b,
        tensors: &tensors,
    };
    let choices = choices(&file, &pair, &model)?;
    let outputs = quantize::outputs(backend, &model, &choices, None, progress)?;
    outputs.check()?;
    let again = format!("{b} quantized again");
    let compared =
        Check::new(&file, &outputs, progress).compare(&pair, &Pair { b: &again, ..pair });
    let equal = file.steady(model.steady(compared))?;
    Ok((equal, tensors.len()))
}

/// The tensors of `model` with what the metadata of `file`, the first of `pair`, say was made of them.
fn choices<'a>(file: &Model, pair: &Pair<'_>, model: &'a Model) -> Result<Vec<Choice<'a>>> {
    let tensors = pair.tensors;
    for (name, tensor) in tensors {
        let Some(source) = model.get(name) else {
            return Err(pair.only_in(name, pair.a, pair.b));
        };
        let text = &tensor.text;
        if source.shape != text.shape || Named::label(source.dtype) != text.dtype {
            return Err(FileError::Differ(format!(
                "'{}' was {} {} when it was quantized for {} and is {} {} in {}",
                shown(name),
                text.dtype,
                dims(&text.shape),
                pair.a,
                source.dtype,
                dims(source.shape),
                pair.b
            )));
        }
    }
    let groups = groups(file, tensors, model)?;
    let choice = |tensor: Tensor<'a>| Choice {
        tensor,
        group: groups.get(tensor.name).copied(),
        matrix: tensors.get(tensor.name).map(|quantized| Matrix {
            shape: quantized.full,
            setup: Setup {
                recipe: quantized.recipe,
                usage: quantized.usage,
                form: quantized.form,
                delayed_scale: quantized.text.delayed_scale,
                dtypes: dtypes(&quantized.fields),
            },
        }),
    };
    Ok(model.tensors().map(choice).collect())
}

fn dtypes(fields: &[Field]) -> Dtypes {
    let native = fields::called(fields, Dtypes::Native);
    let is_native = fields
        .iter()
        .zip(&native)
        .all(|(field, native)| field.dtype == native.dtype);
    match is_native {
        true => Dtypes::Native,
        false => Dtypes::U8,
    }
}

/// The numbers of the groups that have one amax, by name.
fn groups<'t>(
    file: &Model,
    tensors: &'t BTreeMap<String, Quantized>,
    model: &Model,
) -> Result<BTreeMap<&'t str, usize>> {
    let (mut numbers, mut groups) = (BTreeMap::new(), BTreeMap::new());
    for (name, tensor) in tensors {
        let Some(group) = &tensor.text.amax_group else {
            continue;
        };
        // All of its members say the same.
        let other = group.iter().find(|member| {
            let of_member = tensors.get(*member).map(|other| &other.text.amax_group);
            of_member != Some(&tensor.text.amax_group)
        });
        if let Some(other) = other {
            return Err(file_error!(
                file.path(),
                "'{}' has one amax with '{}', which is not there or says otherwise; quantize {} again",
                shown(name),
                shown(other),
                model.path().display()
            ));
        }
        let next = numbers.len();
        groups.insert(name.as_str(), *numbers.entry(group).or_insert(next));
    }
    Ok(groups)
}

/// The comparison of a file with another model, or with what is made of one, each job at a time.
struct Check<'c, 'a> {
    file: &'c Model,
    outputs: &'c Outputs<'a>,
    progress: &'c dyn Progress,
    /// The parts of jobs that were not made.
    of_job: BTreeMap<usize, Vec<(usize, &'c Item<'a>)>>,
    /// The first differences of parts whose job was made and whose turn has not come, by job and part.
    found: BTreeMap<(usize, usize), Option<Byte>>,
}

impl<'c, 'a> Check<'c, 'a> {
    fn new(file: &'c Model, outputs: &'c Outputs<'a>, progress: &'c dyn Progress) -> Self {
        let mut of_job: BTreeMap<usize, Vec<(usize, &Item<'_>)>> = BTreeMap::new();
        for item in outputs.items() {
            if let ItemSource::Made { job, part } = item.source {
                of_job.entry(job).or_default().push((part, item));
            }
        }
        Self {
            file,
            outputs,
            progress,
            of_job,
            found: BTreeMap::new(),
        }
    }

    /// Compares all tensors in the order of names; messages name both by `pair`, and what is made by `made`.
    fn compare(mut self, pair: &Pair<'_>, made: &Pair<'_>) -> Result<Equal> {
        let outputs = self.outputs;
        let items = outputs.items().map(|item| (item.name.as_str(), item));
        let items: BTreeMap<&str, &Item<'_>> = items.collect();
        let names = self.file.tensors().map(|tensor| tensor.name);
        let names: BTreeSet<&str> = names.chain(items.keys().copied()).collect();
        self.progress.begin(outputs.work(u64::MAX));
        for name in names {
            let pair = match items.get(name).map(|item| item.source) {
                Some(ItemSource::Made { .. }) => made,
                _ => pair,
            };
            let (tensor, item) = match (self.file.get(name), items.get(name)) {
                (Some(tensor), Some(item)) => (tensor, *item),
                (_, None) => return Err(pair.only_in(name, pair.a, pair.b)),
                (None, _) => return Err(pair.only_in(name, pair.b, pair.a)),
            };
            let [a, b] = [(tensor.dtype, tensor.shape), (item.dtype, &item.shape[..])];
            if a != b {
                return Err(pair.kinds(name, a, b));
            }
            if let Some(byte) = self.first_difference(&tensor, item)? {
                return Err(pair.bytes(name, byte));
            }
        }
        Ok(Equal {
            tensors: items.len(),
            bytes: bytes(&outputs.groups),
        })
    }

    /// The first byte of `tensor` that is not that of `item`, which has its length.
    fn first_difference(&mut self, tensor: &Tensor<'_>, item: &Item<'_>) -> Result<Option<Byte>> {
        match item.source {
            ItemSource::Input(source) => {
                let mut found = None;
                source.pieces(0..source.len(), |start, bytes| {
                    if found.is_none() {
                        found = compare(tensor, start, bytes)?;
                    }
                    self.progress.add(bytes.len());
                    Ok(())
                })?;
                Ok(found)
            }
            ItemSource::Made { job, part } => {
                if !self.found.contains_key(&(job, part)) {
                    let made = self.make(job);
                    made.with_context(|| format!("'{}'", shown(&item.name)))?;
                }
                Ok(self.found.remove(&(job, part)).flatten())
            }
        }
    }

    /// Makes `job` and compares all of its parts that the file has.
    fn make(&mut self, job: usize) -> Result<()> {
        let of_job = self.of_job.remove(&job).unwrap_or_default();
        let there = |&(part, item): &(usize, &Item<'_>)| {
            let tensor = self.file.get(&item.name)?;
            (tensor.len() == item.bytes).then_some((part, tensor))
        };
        let parts: Vec<(usize, Tensor<'_>)> = of_job.iter().filter_map(there).collect();
        let made = (self.outputs.make)(job)?;
        for band in 0..made.bands() {
            let band = made.band(band)?;
            let band = band.as_deref().unwrap_or(&*made);
            for (part, tensor) in &parts {
                let found = self.found.entry((job, *part)).or_default();
                let Some(region) = band.region(*part) else {
                    continue;
                };
                let mut done = 0;
                let mut take = |bytes: &[u8]| -> Result<()> {
                    for (range, at) in region.pieces(done, bytes.len()) {
                        self.progress.add(range.len());
                        let other = compare(tensor, at, &bytes[range])?;
                        // Bands come in the order of rows, and the first byte is asked for.
                        let both = [*found, other].into_iter().flatten();
                        *found = both.min_by_key(|byte| byte.at);
                    }
                    done += bytes.len();
                    Ok(())
                };
                match band.deferred(*part) {
                    Some(later) => {
                        let handed = later.each(&mut |bytes| take(bytes).map_err(io::Error::other));
                        handed.map_err(|error| error.downcast().unwrap_or_else(FileError::Io))?;
                    }
                    None => band.write(*part, &mut take)?,
                }
            }
        }
        Ok(())
    }
}

/// Bytes from which two threads compare. Fewer are compared before a second thread runs, on a machine that has other work.
const LARGE: usize = 4 << 20;

/// The first of `bytes` that is not that of `tensor`, where they begin at byte `at`.
fn compare(tensor: &Tensor<'_>, at: usize, bytes: &[u8]) -> Result<Option<Byte>> {
    let of = |start: usize, bytes: &[u8]| {
        let mut found = None;
        let from = at + start;
        tensor.pieces(from..from + bytes.len(), |start, there| {
            if found.is_none() {
                found = Byte::first(from + start, there, &bytes[start..start + there.len()]);
            }
            Ok(())
        })?;
        Ok(found)
    };
    if bytes.len() < LARGE {
        return of(0, bytes);
    }
    let middle = bytes.len() / 2;
    let halves = [0..middle, middle..bytes.len()];
    let found = on_threads(&halves, |half| of(half.start, &bytes[half]))?;
    Ok(found.into_iter().flatten().next())
}
