//! [`DelayedState`]: what a delayed scale follows from, in and out of a book.

use lowp_format::{Code, ScaleRule};
use lowp_kernels::Backend;

use super::{ScaleBook, ScaleSlot};
use crate::ShardError;

/// The scale of a tensor and the amaxes of earlier steps that its next one follows from.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedState {
    /// The encode scale of the next cast: values are multiplied by it.
    pub scale: f32,
    /// The amax history, its slot 0 first.
    pub history: Vec<f32>,
}

impl<B: Backend> ScaleBook<B> {
    /// What the scale of `slot` is made for, and how: states fit entries of the same.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn ingredients(&self, slot: ScaleSlot) -> Result<(Code, ScaleRule), ShardError> {
        self.index(slot)?;
        let entry = &self.entries[slot.index];
        Ok((entry.element, entry.rule))
    }

    /// The state of `slot`; `None` if its scale is no delayed one.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn delayed_state(&self, slot: ScaleSlot) -> Result<Option<DelayedState>, ShardError> {
        let Some(history) = self.history(slot)? else {
            return Ok(None);
        };
        let scale = self.scale(slot)?;
        Ok(Some(DelayedState { scale, history }))
    }

    /// Replaces the state of `slot`.
    ///
    /// # Errors
    /// The entry belongs to another book or has no delayed scale, a history of another length, a scale that is no positive finite
    /// number, an amax that is NaN or below zero, or the backend failed. Nothing is replaced then.
    pub fn set_delayed_state(
        &self,
        slot: ScaleSlot,
        state: &DelayedState,
    ) -> Result<(), ShardError> {
        let history = self.histories.get(&self.index(slot)?);
        let needed = history.map_or(0, |history| self.backend.len::<f32>(history));
        let DelayedState { scale, history } = state;
        let wrong = |what: String| Err(ShardError::DelayedState { what });
        if needed == 0 {
            return wrong("this scale follows from no history".to_owned());
        }
        if history.len() != needed {
            let found = history.len();
            return wrong(format!(
                "a history of {found} amaxes where {needed} are kept"
            ));
        }
        if !(*scale > 0.0 && scale.is_finite()) {
            return wrong(format!("the scale is {scale}"));
        }
        // One of infinite values is infinite.
        let fits = |amax: &f32| *amax >= 0.0;
        if let Some(at) = history.iter().position(|amax| !fits(amax)) {
            return wrong(format!("amax {at} of the history is {}", history[at]));
        }
        if let Some(buffer) = self.histories.get(&self.index(slot)?) {
            self.backend.write(buffer, 0, history)?;
        }
        self.set_scale(slot, *scale)
    }
}
