//! Writes safetensors files whose tensors are made one after the other.

use crate::error::{Context, FileError, Result, input_error, mend};
use crate::fields::Field;
use crate::model::Tensor;
use crate::output::background::Deferred;
use crate::output::path::Draft;
use crate::progress::Progress;
use crate::region::Region;
use crate::remedy::Remedy;
use crate::text::shown;
use lowp_checkpoint::{HEADER_LENGTH, HeaderEntry, MAX_HEADER};
use safetensors::Dtype;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug)]
pub(crate) enum ItemSource<'a> {
    Input(Tensor<'a>),
    /// Part `part` of what [`Make`] returns for `job`.
    Made {
        job: usize,
        part: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Item<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: usize,
    pub(crate) source: ItemSource<'a>,
}

impl<'a> Item<'a> {
    pub(crate) fn input(tensor: Tensor<'a>) -> Self {
        Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            bytes: tensor.len(),
            source: ItemSource::Input(tensor),
        }
    }

    /// Part `part` of what is made of `job`.
    pub(crate) fn made(
        job: usize,
        part: usize,
        name: String,
        dtype: Dtype,
        shape: Vec<usize>,
    ) -> Self {
        let elements: usize = shape.iter().product();
        Self {
            name,
            dtype,
            bytes: (elements * dtype.bitsize()).div_ceil(8),
            shape,
            source: ItemSource::Made { job, part },
        }
    }

    /// The `fields` of the tensor called `name`, which are made of `job`.
    pub(crate) fn fields(job: usize, name: &str, fields: &[Field]) -> Vec<Self> {
        let item = |(part, field): (usize, &Field)| {
            Self::made(
                job,
                part,
                field.name(name),
                field.dtype,
                field.shape.clone(),
            )
        };
        fields.iter().enumerate().map(item).collect()
    }
}

pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Bytes that bands take at most, but for the rows that blocks need: the values of one, unless they are read where they are mapped, what it
/// becomes, and what the band before became. With what else a command holds they are fewer than 256 MB. Tests have many bands.
pub(crate) const HELD: usize = if cfg!(test) { 1 << 20 } else { 192 << 20 };
/// Bytes of a band that may wait to be written while the next one is made.
const WAITING: usize = HELD / 2;

/// What a job made; its parts become bytes one at a time.
pub(crate) trait Parts {
    /// Hands the bytes of one part to `sink`; never called of what has bands.
    fn write(&self, _part: usize, _sink: &mut Sink<'_>) -> Result<()> {
        Err(FileError::Missing("its bands are written".to_owned()))
    }

    /// The bytes of one part as another thread can read them while what comes next is made; `None` of parts that are handed over.
    fn deferred(&self, _part: usize) -> Option<Box<dyn Deferred>> {
        None
    }

    /// Where the bytes of one part lie in the whole part; `None` where this has none of them.
    fn region(&self, _part: usize) -> Option<Region> {
        Some(Region::FIRST)
    }

    /// Number of bands of rows that this is made in, one after the other.
    fn bands(&self) -> usize {
        1
    }

    /// Whether a band lies in other memory than the one before it, which may still be written while this one is made.
    fn bands_alternate(&self) -> bool {
        true
    }

    /// Bytes that a band takes while it is made and until it is written.
    fn held(&self) -> usize {
        0
    }

    /// The parts of one band; `None` where this has them itself. Whoever takes a band is done with all but the one before it, and with
    /// that one, too, where bands do not alternate.
    fn band(&self, _band: usize) -> Result<Option<Box<dyn Parts + '_>>> {
        Ok(None)
    }
}

/// Parts with the region of each in the whole part, if it has any there.
pub(crate) struct InRegions<P> {
    pub(crate) parts: P,
    pub(crate) regions: Vec<Option<Region>>,
}

impl<P: Parts> Parts for InRegions<P> {
    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()> {
        self.parts.write(part, sink)
    }

    fn deferred(&self, part: usize) -> Option<Box<dyn Deferred>> {
        self.parts.deferred(part)
    }

    fn region(&self, part: usize) -> Option<Region> {
        self.regions.get(part).copied().flatten()
    }
}

pub(crate) type Make<'a> = Box<dyn Fn(usize) -> Result<Box<dyn Parts + 'a>> + 'a>;

pub(crate) fn check_names<'i, 'a: 'i>(items: impl IntoIterator<Item = &'i Item<'a>>) -> Result<()> {
    let mut seen = BTreeSet::new();
    match items
        .into_iter()
        .find(|item| !seen.insert(item.name.as_str()))
    {
        None => Ok(()),
        Some(item) => Err(input_error(format!(
            "two output tensors would be called '{}'; rename one in the input, or leave it out",
            shown(&item.name)
        ))),
    }
}

/// The items in the order in which they are written, which is that of the safetensors package: wide dtypes first, so
/// that every tensor is aligned.
pub(crate) fn sorted<'i, 'a: 'i>(
    items: impl IntoIterator<Item = &'i Item<'a>>,
) -> Vec<&'i Item<'a>> {
    let mut items: Vec<&Item<'_>> = items.into_iter().collect();
    items.sort_by_key(|item| (Reverse(item.dtype), item.name.as_str()));
    items
}

/// Writes `items`, which are [`sorted`] and follow each other from byte `begin` on; `bytes` says how many each has in this file, or that
/// it is in another one. Each job is made once, and its parts are written to their places.
pub(crate) fn fill(
    draft: &mut Draft,
    begin: u64,
    items: &[&Item<'_>],
    make: &Make<'_>,
    progress: &dyn Progress,
    bytes: impl Fn(&Item<'_>) -> Result<Option<usize>>,
) -> Result<()> {
    let (mut at, mut places) = (begin, Vec::with_capacity(items.len()));
    let mut of_job: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (number, item) in items.iter().enumerate() {
        let bytes = bytes(item)?;
        places.push((at, bytes));
        at += bytes.unwrap_or(0) as u64;
        if let ItemSource::Made { job, .. } = item.source {
            of_job.entry(job).or_default().push(number);
        }
    }
    // Bytes of the band before that are written from where they lie, and may still be while the next one is made.
    let mut waiting = 0;
    for (number, item) in items.iter().enumerate() {
        let job = match item.source {
            ItemSource::Made { job, .. } => job,
            ItemSource::Input(tensor) => {
                if let (at, Some(bytes)) = places[number] {
                    let written = put(draft, at, item, 0, &tensor, progress)?;
                    check(item, written.bytes, bytes)?;
                }
                continue;
            }
        };
        let Some(numbers) = of_job.remove(&job) else {
            continue;
        };
        let named = || format!("'{}'", shown(&item.name));
        draft.settle(waiting)?;
        let parts = make(job).with_context(named)?;
        let mut written = vec![0; numbers.len()];
        let alternate = parts.bands_alternate();
        if parts.held().saturating_add(waiting) > HELD {
            // The band before is of another job, and may be larger than those of this one.
            waiting = 0;
        }
        for band in 0..parts.bands() {
            draft.settle(if alternate { waiting } else { 0 })?;
            let band = parts.band(band).with_context(named)?;
            let (band, mut given) = (band.as_deref().unwrap_or(&*parts), 0);
            for (&number, written) in numbers.iter().zip(&mut written) {
                let item = items[number];
                if let ((at, Some(_)), ItemSource::Made { part, .. }) =
                    (places[number], item.source)
                {
                    let own = put(draft, at, item, part, band, progress)?;
                    *written += own.bytes;
                    given += own.later;
                }
            }
            waiting = if alternate && given <= WAITING {
                given
            } else {
                0
            };
        }
        for (number, written) in numbers.into_iter().zip(written) {
            if let (_, Some(bytes)) = places[number] {
                check(items[number], written, bytes)?;
            }
        }
    }
    Ok(())
}

/// What [`put`] wrote.
struct Put {
    bytes: usize,
    /// Bytes in memory that are written later, padding included.
    later: usize,
}

/// Writes what `parts` have of `item`, their part `part`, which begins at byte `at`.
fn put(
    draft: &mut Draft,
    at: u64,
    item: &Item<'_>,
    part: usize,
    parts: &dyn Parts,
    progress: &dyn Progress,
) -> Result<Put> {
    let Some(region) = parts.region(part) else {
        return Ok(Put { bytes: 0, later: 0 });
    };
    let named = || format!("'{}'", shown(&item.name));
    let mut deferred = parts.deferred(part);
    if deferred.is_none() && !region.is_one_run() {
        // Many short runs are written from one place in memory, too.
        let mut bytes = Vec::new();
        let mut sink = |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        parts.write(part, &mut sink).with_context(named)?;
        deferred = Some(Box::new(bytes));
    }
    if let Some(deferred) = deferred {
        let bytes = deferred.len();
        let placed = region.placed(bytes);
        draft.write_deferred(at, region, deferred)?;
        progress.add(placed);
        return Ok(Put {
            bytes: placed,
            later: bytes,
        });
    }
    let mut written = 0;
    let mut sink = |piece: &[u8]| {
        for (range, to) in region.pieces(written, piece.len()) {
            progress.add(range.len());
            draft.write_at(at + to as u64, &piece[range])?;
        }
        written += piece.len();
        Ok(())
    };
    parts.write(part, &mut sink).with_context(named)?;
    Ok(Put {
        bytes: region.placed(written),
        later: 0,
    })
}

/// The bytes of an input are its only part.
impl Parts for Tensor<'_> {
    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        self.pieces(0..self.len(), |_, piece| sink(piece))
    }
}

fn check(item: &Item<'_>, written: usize, bytes: usize) -> Result<()> {
    match written == bytes {
        true => Ok(()),
        false => Err(FileError::Missing(format!(
            "'{}': {written} bytes were made where {bytes} were announced",
            shown(&item.name)
        ))),
    }
}

/// The bytes before the first tensor, of items that are [`sorted`].
pub(crate) fn header(items: &[&Item<'_>], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let entries = items.iter().map(|item| HeaderEntry {
        name: &item.name,
        dtype: item.dtype,
        shape: &item.shape,
        bytes: item.bytes,
    });
    let header = lowp_checkpoint::header(entries, metadata)?;
    let bytes = header.len() - HEADER_LENGTH;
    if bytes > MAX_HEADER {
        return Err(mend(
            format!(
                "the header of the output would have {bytes} bytes and the format allows {MAX_HEADER}"
            ),
            Remedy::QuantizeFewer,
        ));
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::path::OutputFile;
    use crate::outputs::{Group, Outputs};
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::sleep;
    use std::time::Duration;

    const LEN: usize = 1 << 10;
    const BANDS: usize = 3;

    /// Bands of one memory, or of two that alternate: none may be made before those that were there before it are written.
    struct Bands {
        written: Arc<AtomicUsize>,
        job: usize,
        alternate: bool,
        held: usize,
    }

    /// One of them.
    struct Band(Arc<AtomicUsize>, usize);

    /// What is written slowly, and counted.
    struct Slow(Arc<AtomicUsize>);

    impl Deferred for Slow {
        fn len(&self) -> usize {
            LEN
        }

        fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
            sleep(Duration::from_millis(20));
            take(&[1; LEN])?;
            self.0.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    impl Parts for Band {
        fn write(&self, _: usize, _: &mut Sink<'_>) -> Result<()> {
            Err(FileError::Missing("it is written later".to_owned()))
        }

        fn deferred(&self, _: usize) -> Option<Box<dyn Deferred>> {
            Some(Box::new(Slow(Arc::clone(&self.0))))
        }

        fn region(&self, _: usize) -> Option<Region> {
            Some(Region::from(self.1 * LEN))
        }
    }

    impl Parts for Bands {
        fn bands(&self) -> usize {
            BANDS
        }

        fn bands_alternate(&self) -> bool {
            self.alternate
        }

        fn held(&self) -> usize {
            self.held
        }

        fn band(&self, band: usize) -> Result<Option<Box<dyn Parts + '_>>> {
            let written = self.written.load(Ordering::SeqCst);
            let before = self.job * BANDS + band;
            let is_alone = !self.alternate || band == 0 && self.held + LEN > HELD;
            let least = before.saturating_sub(usize::from(!is_alone));
            assert!(
                written >= least,
                "band {before} where {written} are written"
            );
            Ok(Some(Box::new(Band(Arc::clone(&self.written), band))))
        }
    }

    /// Writes two jobs whose bands check that those before them are written.
    fn write(alternate: bool, held: usize) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let target = OutputFile::new(&folder.path().join("out"), [])?;
        let written = Arc::new(AtomicUsize::new(0));
        let item = |job: usize| Item {
            name: job.to_string(),
            dtype: Dtype::U8,
            shape: vec![BANDS * LEN],
            bytes: BANDS * LEN,
            source: ItemSource::Made { job, part: 0 },
        };
        let to = Arc::clone(&written);
        let bands = move |job| Bands {
            written: Arc::clone(&to),
            job,
            alternate,
            held,
        };
        let outputs = Outputs {
            groups: (0..2).map(|job| Group::of(item(job))).collect(),
            metadata: BTreeMap::new(),
            make: Box::new(move |job| Ok(Box::new(bands(job)))),
            sources: vec![0; 2],
        };
        let progress = ();
        let write = |draft: &mut Draft| outputs.write_file(&outputs.groups, draft, &progress);
        target.fill(write, || Ok(()))?;
        assert_eq!(written.load(Ordering::SeqCst), 2 * BANDS);
        Ok(())
    }

    #[test]
    fn bands_of_one_memory_are_written_first() -> Result<()> {
        write(false, 0)
    }

    /// All but the band before are written where bands alternate, and that one, too, where there is no room for the first of another job.
    #[test]
    fn bands_that_alternate_wait_for_all_but_one() -> Result<()> {
        write(true, 0)?;
        write(true, HELD)
    }
}
