//! Whether a file is what quantizing a model makes of it.

use crate::difference::{Byte, Equal, Pair};
use crate::dtypes::{Dtypes, Named};
use crate::error::{Context, FileError, Result, file_error, mend_file};
use crate::fields::{self, Field};
use crate::interchange::hub::Hub;
use crate::meta::{self, Quantized};
use crate::model::{Model, Tensor};
use crate::outputs::{Outputs, bytes};
use crate::progress::Progress;
use crate::quantize;
use crate::remedy::Remedy;
use crate::select::{Choice, Matrix, Setup, reject_quantized};
use crate::text::{dims, shown};
use crate::write::{Item, ItemSource};
use lowp_kernels::Backend;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::thread;

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
    if let Some(name) = tensors
        .values()
        .find(|t| t.shard.is_some())
        .map(|t| &t.name)
    {
        return Err(mend_file(
            file.path(),
            format!("it holds one rank's rows of '{}'", shown(name)),
            Remedy::Unshard,
        ));
    }
    let model = Hub::open(source)?.model;
    reject_quantized(&model)?;
    let choices = choices(&file, &tensors, &model)?;
    let outputs = quantize::outputs(backend, &model, &choices, None, progress)?;
    outputs.check()?;

    let items: BTreeMap<&str, &Item<'_>> = outputs
        .items()
        .map(|item| (item.name.as_str(), item))
        .collect();
    let names: BTreeSet<&str> = file
        .tensors()
        .map(|tensor| tensor.name)
        .chain(items.keys().copied())
        .collect();
    let (a, b) = names_of(&file, &model);
    let requantized = format!("{b} quantized again");
    progress.begin(outputs.work(u64::MAX));
    let mut check = Check::new(&file, &outputs, progress);
    let compared = names.into_iter().try_for_each(|name| {
        let item = items.get(name).copied();
        let made = item.is_some_and(|item| matches!(item.source, ItemSource::Made { .. }));
        let pair = Pair {
            a: &a,
            b: if made { &requantized } else { &b },
            tensors: &tensors,
        };
        let (tensor, item) = match (file.get(name), item) {
            (Some(tensor), Some(item)) => (tensor, item),
            (_, None) => return Err(pair.only_in_a(name)),
            (None, _) => return Err(pair.only_in_b(name)),
        };
        if (tensor.dtype, tensor.shape) != (item.dtype, &item.shape[..]) {
            let (found, expected) = ((tensor.dtype, tensor.shape), (item.dtype, &item.shape[..]));
            return Err(pair.kinds(name, found, expected));
        }
        if let Some(byte) = check.first_difference(&tensor, item)? {
            return Err(pair.bytes(name, byte));
        }
        Ok(())
    });
    file.steady(model.steady(compared))?;
    Ok((
        Equal {
            tensors: items.len(),
            bytes: bytes(&outputs.groups),
        },
        tensors.len(),
    ))
}

fn names_of(file: &Model, model: &Model) -> (String, String) {
    let name = |model: &Model| model.path().display().to_string();
    (name(file), name(model))
}

/// The tensors of `model` with what `tensors` of `file` say was made of them.
fn choices<'a>(
    file: &Model,
    tensors: &BTreeMap<String, Quantized>,
    model: &'a Model,
) -> Result<Vec<Choice<'a>>> {
    let (a, b) = names_of(file, model);
    for (name, tensor) in tensors {
        let Some(source) = model.get(name) else {
            return Err(FileError::Differ(format!(
                "'{}' is in {a} and not in {b}",
                shown(name)
            )));
        };
        let text = &tensor.text;
        if source.shape != text.shape || Named::label(source.dtype) != text.dtype {
            return Err(FileError::Differ(format!(
                "'{}' was {} {} when it was quantized for {a} and is {} {} in {b}",
                shown(name),
                text.dtype,
                dims(&text.shape),
                source.dtype,
                dims(source.shape)
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

/// What the file calls the codes of a tensor.
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

/// The comparison of a file with what is made of a model, each job at a time.
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

    /// The first byte of `tensor` that is not that of `item`, which has its length.
    fn first_difference(&mut self, tensor: &Tensor<'_>, item: &Item<'_>) -> Result<Option<Byte>> {
        match item.source {
            ItemSource::Input(source) => {
                let mut found = None;
                source.pieces(0..source.len(), |start, bytes| {
                    self.progress.add(bytes.len());
                    found = found.or(compare(tensor, start, bytes)?);
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
                        let mut failed = None;
                        let handed = later.each(&mut |bytes| {
                            take(bytes).map_err(|error| {
                                failed = Some(error);
                                io::ErrorKind::Other.into()
                            })
                        });
                        match failed {
                            Some(error) => return Err(error),
                            None => handed?,
                        }
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
    let (low, high) = bytes.split_at(bytes.len() / 2);
    thread::scope(|scope| {
        let other = thread::Builder::new().spawn_scoped(scope, || of(low.len(), high));
        let first = of(0, low);
        let other = match other {
            Ok(thread) => thread
                .join()
                .map_err(|_| FileError::Missing("a reader panicked".to_owned()))?,
            // The system has no thread for it.
            Err(_) => of(low.len(), high),
        };
        Ok(first?.or(other?))
    })
}
