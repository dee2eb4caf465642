//! [`Bands`]: the cast of a matrix in bands of rows, so that memory holds a band and the codes of two, or of one where two would be too many.

use crate::cast::{self, Needs, SharedAmaxes, cast, cast_known, empty, observe};
use crate::error::Result;
use crate::fields::{Field, worked};
use crate::model::Tensor;
use crate::pack::Packed;
use crate::process;
use crate::progress::Progress;
use crate::region::{Region, is_of_all_rows, is_whole};
use crate::reuse::DoubleBuffer;
use crate::select::Matrix;
use crate::source::{Room, has_room, load_in, mapped};
use crate::write::{HELD, InRegions, Parts};
use half::bf16;
use lowp_comm::LocalComm;
use lowp_format::{Axis, Recipe, Shape};
use lowp_kernels::{Backend, Source};
use safetensors::Dtype;
use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// Bytes of source in a band, about, where the bytes of its rows follow each other in all that is made of them: source and codes stay in
/// the caches from the cast to the file. Tests have many bands.
const CACHED: usize = if cfg!(test) { 1 << 16 } else { 4 << 20 };
/// The same where they do not: long bands make long runs.
const LONG: usize = if cfg!(test) { 1 << 18 } else { 64 << 20 };
/// The rows of a band are a multiple of this, four blocks of 128 rows, which scales are padded to at most, or a lower power of two.
const UNIT: usize = 512;
/// Rows of a band, at least.
const LEAST_ROWS: usize = 32;
/// Rows of a band, at least, where they are not over [`HELD`].
const USUAL_LEAST_ROWS: usize = 128;
/// Rows of a band, at least, where they are not over [`HELD`] and bytes do not follow each other: each column is a run, and shorter ones take
/// longer to write than to make (1024 x 262144 F32 to mxfp4).
const LEAST_ROWS_OF_RUNS: usize = 512;

/// Bytes of a band from which memory of other sizes is given back to the system first.
const LARGE: usize = 16 << 20;

#[derive(Clone, Debug)]
pub(crate) struct Cast<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) tensor: Tensor<'a>,
    pub(crate) matrix: Matrix,
    pub(crate) fields: Vec<Field>,
    pub(crate) progress: &'a dyn Progress,
}

/// What the bands of all matrices use, one after the other.
pub(crate) struct Memory<B: Backend> {
    room: Room<B>,
    codes: DoubleBuffer<cast::Tensor<B>>,
}

impl<B: Backend> Default for Memory<B> {
    fn default() -> Self {
        Self {
            room: Room::default(),
            codes: DoubleBuffer::default(),
        }
    }
}

/// Amaxes that bands have in common.
#[derive(Default)]
struct Amaxes {
    /// Of the tensor, or of all that it has one amax with.
    tensor: Option<f32>,
    /// Of columns, where scales are those of lines.
    lines: Option<SharedAmaxes>,
}

/// A matrix whose bands are cast when they are asked for.
pub(crate) struct Bands<'a, B: Backend> {
    cast: Cast<'a, B>,
    shape: Shape,
    /// The amax of all that the tensor has one amax with.
    shared: Option<f32>,
    /// What bands have in common, once one is asked for.
    amaxes: OnceCell<Amaxes>,
    needs: Needs,
    /// Whether one cast of all rows finds by itself what it depends on.
    alone: bool,
    rows: usize,
    /// All values, where they are read from the file's pages.
    mapped: Option<Source<B>>,
    loaded: RefCell<Option<(Range<usize>, Source<B>)>>,
    memory: Rc<Memory<B>>,
}

impl<'a, B: Backend> Bands<'a, B> {
    /// Cuts the matrix of `cast` into bands. Its amax is `shared` where it has one with others.
    pub(crate) fn new(
        cast: Cast<'a, B>,
        shared: Option<f32>,
        memory: &Rc<Memory<B>>,
    ) -> Result<Self> {
        let Matrix { shape, setup } = cast.matrix;
        let specs = setup.recipe.buffers(setup.usage);
        let needs = Needs::of(&setup.recipe, setup.usage);
        let alone = needs == Needs::All || shape.elements() == 0;
        let mut bands = Self {
            shape: worked(shape, shape, &specs),
            shared,
            amaxes: OnceCell::new(),
            needs,
            alone,
            rows: shape.rows.max(1),
            mapped: mapped(&cast.tensor),
            loaded: RefCell::new(None),
            memory: Rc::clone(memory),
            cast,
        };
        if !alone {
            bands.rows = bands.rows_of_a_band()?;
        }
        Ok(bands)
    }

    /// What bands have in common, found in a pass over all of them where it has to be.
    fn amaxes(&self) -> Result<&Amaxes> {
        if let Some(amaxes) = self.amaxes.get() {
            return Ok(amaxes);
        }
        let Cast {
            backend,
            matrix: Matrix { setup, .. },
            ..
        } = self.cast;
        let (recipe, usage) = (&setup.recipe, setup.usage);
        let mut found = Amaxes {
            tensor: self.shared,
            lines: None,
        };
        if !self.alone && self.needs == Needs::Lines {
            let mut lines = SharedAmaxes::default();
            let passed = match SharedAmaxes::are_any(recipe, usage) {
                true => self.bands(),
                false => 0,
            };
            for band in 0..passed {
                let rows = self.rows_of(band);
                let shape = Shape::new(rows.len(), self.shape.cols);
                lines.observe(backend, recipe, usage, shape, self.source(&rows)?)?;
            }
            found.lines = Some(lines);
        }
        if !self.alone && self.needs == Needs::Tensor && self.shared.is_none() {
            let amax = backend.alloc::<f32>(1)?;
            for band in 0..self.bands() {
                let source = self.source(&self.rows_of(band))?;
                observe(backend, recipe, source, &amax)?;
            }
            found.tensor = Some(backend.download::<f32>(&amax)?[0]);
        }
        Ok(self.amaxes.get_or_init(|| found))
    }

    /// Lets go of what the matrix before had and this one has no use for.
    fn make_room(&self, rows: &Range<usize>) {
        let Cast {
            backend, tensor, ..
        } = self.cast;
        let most = self.rows * self.shape.cols;
        let loads = self.mapped.is_none();
        let fits = |source: &Source<B>| loads && has_room(backend, source, &tensor, most);
        let values = self.memory.room.keep(fits);
        let codes = self.memory.codes.keep(|codes| self.fits(codes, rows));
        if (values || codes) && self.held() >= LARGE {
            (process::hooks().after_free)();
        }
    }

    fn fits(&self, codes: &cast::Tensor<B>, rows: &Range<usize>) -> bool {
        let Matrix { setup, .. } = self.cast.matrix;
        let specs = setup.recipe.buffers(setup.usage);
        codes.recipe() == setup.recipe
            && codes.shape() == Shape::new(rows.len(), self.shape.cols)
            && codes.buffers().iter().map(|buffer| buffer.spec).eq(specs)
    }

    /// Rows of a band: whole blocks and tiles, as many as fit.
    fn rows_of_a_band(&self) -> Result<usize> {
        let row = (self.cast.tensor.len() / self.shape.rows.max(1)).max(1);
        let layouts = || {
            let layouts = self.cast.fields.iter().filter_map(|field| field.layout);
            layouts.filter(|layout| !is_of_all_rows(layout))
        };
        let follow = layouts().all(|layout| layout.axes()[0] == Axis::Rows);
        let bytes = match (&self.mapped, follow) {
            (Some(_), true) => CACHED,
            (Some(_), false) => LONG,
            // They are held, and may be wider there.
            (None, _) => LONG / 2,
        };
        let most = HELD / self.held_by_a_row().max(1);
        let least = match follow {
            true => USUAL_LEAST_ROWS,
            false => LEAST_ROWS_OF_RUNS,
        };
        let rows = (bytes / row).max(least).min(most);
        let mut rows = match rows {
            0..UNIT => 1 << rows.max(LEAST_ROWS).ilog2(),
            _ => rows / UNIT * UNIT,
        };
        while rows < self.shape.rows {
            let fields = self.fields(rows)?;
            let mut layouts = fields.iter().filter_map(|field| field.layout);
            if layouts.all(|layout| is_of_all_rows(&layout) || is_whole(&layout, rows)) {
                return Ok(rows);
            }
            rows *= 2;
        }
        Ok(self.shape.rows)
    }

    /// Bytes that a row takes while it is cast and written.
    fn held_by_a_row(&self) -> usize {
        let values = match (&self.mapped, self.cast.tensor.dtype) {
            (Some(_), _) => 0,
            (None, Dtype::BF16) => size_of::<bf16>(),
            (None, _) => size_of::<f32>(),
        };
        let codes: usize = self.cast.fields.iter().map(Field::bytes).sum();
        self.shape.cols * values + 2 * codes / self.shape.rows.max(1)
    }

    fn fields(&self, rows: usize) -> Result<Vec<Field>> {
        let Matrix { shape, setup } = self.cast.matrix;
        Ok(setup.fields(shape.with_rows(rows))?)
    }

    fn rows_of(&self, band: usize) -> Range<usize> {
        let end = |band: usize| (band * self.rows).min(self.shape.rows);
        end(band)..end(band + 1)
    }

    fn source(&self, rows: &Range<usize>) -> Result<Source<B>> {
        let backend = self.cast.backend;
        let elements = rows.start * self.shape.cols..rows.end * self.shape.cols;
        if let Some(mapped) = &self.mapped {
            return Ok(mapped.view(backend, elements)?);
        }
        let mut loaded = self.loaded.borrow_mut();
        if let Some((_, source)) = loaded.as_ref().filter(|(range, _)| *range == elements) {
            return Ok(source.clone());
        }
        // Room for the next one first.
        *loaded = None;
        // Counted where it is cast.
        let tensor = &self.cast.tensor;
        let source = load_in(
            backend,
            &self.memory.room,
            self.rows * self.shape.cols,
            tensor,
            elements.clone(),
            &(),
        )?;
        *loaded = Some((elements, source.clone()));
        Ok(source)
    }
}

impl<B: Backend> Parts for Bands<'_, B> {
    fn bands(&self) -> usize {
        self.shape.rows.div_ceil(self.rows).max(1)
    }

    fn bands_alternate(&self) -> bool {
        self.held_by_a_row().saturating_mul(self.rows) <= HELD
    }

    fn held(&self) -> usize {
        let codes =
            self.cast.fields.iter().map(Field::bytes).sum::<usize>() / self.shape.rows.max(1);
        (self.held_by_a_row() - codes).saturating_mul(self.rows)
    }

    fn band(&self, band: usize) -> Result<Option<Box<dyn Parts + '_>>> {
        let Cast {
            backend,
            tensor: values,
            matrix: Matrix { setup, .. },
            ref fields,
            progress,
        } = self.cast;
        let rows = self.rows_of(band);
        // Room for the values first.
        self.make_room(&rows);
        let known = self.amaxes()?;
        let source = self.source(&rows)?;
        let shape = Shape::new(rows.len(), self.shape.cols);
        let specs = setup.recipe.buffers(setup.usage);
        let make = || empty(backend, setup.recipe, shape, &specs);
        let fits = |codes: &cast::Tensor<B>| self.fits(codes, &rows);
        let codes = &self.memory.codes;
        let tensor = codes.take(self.bands_alternate(), fits, make)?;
        let mut amax = known.tensor;
        if self.alone {
            let solo = LocalComm::solo(backend);
            amax = cast(backend, &solo, &tensor, source, setup.delayed_scale, amax)?;
        } else if let Some(amaxes) = &known.lines {
            amaxes.cast(backend, &tensor, source)?;
        } else {
            cast_known(backend, &tensor, source, setup.delayed_scale, amax)?;
        }
        progress.add(values.len() / self.shape.rows.max(1) * rows.len());
        if rows.len() >= self.shape.rows && self.bands() == 1 {
            return Ok(Some(Packed::parts(backend, tensor, amax, fields.clone())));
        }
        let own = self.fields(rows.len())?;
        let region = |(whole, own): (&Field, &Field)| match (&whole.layout, &own.layout) {
            (Some(whole), Some(own)) if !is_of_all_rows(whole) => {
                Some(Region::of(whole, own, rows.start))
            }
            // The same for all rows.
            _ => (band == 0).then_some(Region::FIRST),
        };
        Ok(Some(Box::new(InRegions {
            regions: fields.iter().zip(&own).map(region).collect(),
            parts: Packed::new(backend, tensor, amax, own),
        })))
    }
}

#[cfg(test)]
mod tests;
