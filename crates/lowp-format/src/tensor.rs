//! [`QuantizedTensor`]: a recipe, a shape and a list of buffers.

use smallvec::SmallVec;

use crate::{
    AnyRecipe, BufferKey, BufferSpec, FormatError, Orientation, Part, Recipe, Shape, Usage,
};

/// One buffer of a tensor with its storage.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer<S> {
    /// What the buffer holds, and how.
    pub spec: BufferSpec,
    /// Where the buffer lies.
    pub storage: S,
}

/// A quantized matrix. Which usages it has is which buffers it holds.
///
/// `S` is the storage of one buffer: host bytes, a device allocation, a file range.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedTensor<S, R = AnyRecipe> {
    recipe: R,
    shape: Shape,
    buffers: SmallVec<[Buffer<S>; 6]>,
}

impl<S, R: Recipe> QuantizedTensor<S, R> {
    /// A tensor of `shape` whose buffers for `usage` come from `alloc(spec, bytes)`.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or whatever `alloc` returns.
    pub fn new<E: From<FormatError>>(
        recipe: R,
        shape: Shape,
        usage: Usage,
        alloc: impl FnMut(&BufferSpec, usize) -> Result<S, E>,
    ) -> Result<Self, E> {
        Self::with_buffers(recipe, shape, recipe.buffers(usage), alloc)
    }

    /// A tensor that holds exactly `specs`.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, a spec that no buffer has, or whatever `alloc` returns.
    pub fn with_buffers<E: From<FormatError>>(
        recipe: R,
        shape: Shape,
        specs: impl IntoIterator<Item = BufferSpec>,
        mut alloc: impl FnMut(&BufferSpec, usize) -> Result<S, E>,
    ) -> Result<Self, E> {
        recipe.check(shape)?;
        let buffers = specs
            .into_iter()
            .map(|spec| {
                spec.check(shape)?;
                Ok(Buffer {
                    spec,
                    storage: alloc(&spec, spec.bytes(shape))?,
                })
            })
            .collect::<Result<_, E>>()?;
        Ok(Self {
            recipe,
            shape,
            buffers,
        })
    }

    /// The recipe.
    pub fn recipe(&self) -> R {
        self.recipe
    }

    /// The logical shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The buffers, in the recipe's order.
    pub fn buffers(&self) -> &[Buffer<S>] {
        &self.buffers
    }

    /// The orientations that the data buffers serve.
    pub fn usage(&self) -> Usage {
        self.buffers
            .iter()
            .filter(|b| b.spec.key.part == Part::Data)
            .fold(Usage::empty(), |usage, b| usage | b.spec.key.usage)
    }

    /// The buffer above the block scales of `orientation`, or alone: decode scales or amaxes of the tensor or of its
    /// lines, as its [`Part`] says.
    pub fn outer(&self, orientation: Orientation) -> Option<&Buffer<S>> {
        self.buffers
            .iter()
            .find(|b| b.spec.key.part.is_outer() && b.spec.key.usage.contains(orientation.usage()))
    }

    /// The buffer of that name.
    ///
    /// # Errors
    /// The tensor does not hold it.
    pub fn buffer(&self, key: BufferKey) -> Result<&Buffer<S>, FormatError> {
        self.buffers
            .iter()
            .find(|b| b.spec.key == key)
            .ok_or_else(|| FormatError::MissingBuffer {
                key,
                usage: self.usage(),
            })
    }

    /// The buffer that holds `part` for `orientation`, if there is one.
    pub fn part(&self, orientation: Orientation, part: Part) -> Option<&Buffer<S>> {
        self.buffers
            .iter()
            .find(|b| b.spec.key.serves(orientation, part))
    }

    /// The element codes for `orientation`.
    ///
    /// # Errors
    /// The tensor cannot serve that orientation.
    pub fn data(&self, orientation: Orientation) -> Result<&Buffer<S>, FormatError> {
        self.part(orientation, Part::Data)
            .ok_or_else(|| FormatError::MissingUsage {
                orientation,
                usage: self.usage(),
            })
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(|b| b.spec.bytes(self.shape)).sum()
    }

    /// The tensor over another storage.
    ///
    /// # Errors
    /// Whatever `f` returns first.
    pub fn try_map<T, E>(
        &self,
        mut f: impl FnMut(&Buffer<S>) -> Result<T, E>,
    ) -> Result<QuantizedTensor<T, R>, E> {
        let buffers = self
            .buffers
            .iter()
            .map(|b| {
                Ok(Buffer {
                    spec: b.spec,
                    storage: f(b)?,
                })
            })
            .collect::<Result<_, E>>()?;
        Ok(QuantizedTensor {
            recipe: self.recipe,
            shape: self.shape,
            buffers,
        })
    }
}
