//! [`OptimError`]: what can be wrong with parameters and steps.

use lowp_comm::CommError;
use lowp_format::FormatError;
use lowp_gemm::GemmError;
use lowp_kernels::KernelError;
use lowp_shard::ShardError;
use thiserror::Error;

/// What is wrong, with the numbers and the remedy.
#[derive(Debug, Error)]
pub enum OptimError {
    /// A shape or recipe is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A kernel rejected its job.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A collective failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Two parameters of one name.
    #[error(
        "two parameters are called '{name}'; every parameter is updated exactly once per step, so register it once"
    )]
    DuplicateParam {
        /// The name.
        name: String,
    },
    /// A parameter group that does not exist.
    #[error(
        "parameter '{name}' is in group {group}, and there are {groups} groups; add the group first"
    )]
    NoGroup {
        /// The parameter.
        name: String,
        /// The group given.
        group: usize,
        /// Number of groups.
        groups: usize,
    },
    /// A parameter that cannot be made orthogonal.
    #[error("parameter '{name}' is in a group of {rule}, and cannot be made orthogonal: {why}")]
    Matrix {
        /// The parameter.
        name: String,
        /// The rule of its group.
        rule: &'static str,
        /// Why not, and what to do.
        why: String,
    },
    /// A product failed.
    #[error(transparent)]
    Gemm(#[from] GemmError),
    /// Values of the wrong length.
    #[error("parameter '{name}': {what} has {found} values, but this rank's shard has {needed}")]
    Length {
        /// The parameter.
        name: String,
        /// What was given.
        what: &'static str,
        /// Values given.
        found: usize,
        /// Values needed.
        needed: usize,
    },
    /// Another number of gradients than parameters.
    #[error(
        "{found} gradients for {needed} parameters; give one for each, in the order in which they were added"
    )]
    GradCount {
        /// Parameters.
        needed: usize,
        /// Gradients given.
        found: usize,
    },
    /// Another number of step counts than parameters.
    #[error(
        "{found} step counts for {needed} parameters; give one for each, in the order in which they were added"
    )]
    StepCounts {
        /// Parameters.
        needed: usize,
        /// Step counts given.
        found: usize,
    },
    /// Another rule than the one that is planned.
    #[error(
        "group {group} is updated by {planned}, which is part of the plan; make a new optimizer to update it by {given}"
    )]
    GroupRule {
        /// The group.
        group: usize,
        /// Its rule.
        planned: &'static str,
        /// The rule given.
        given: &'static str,
    },
    /// A master in two halves, of which the parameter is none.
    #[error(
        "parameter '{name}' is not a half of its master of 16 + 16 bits: the half of such a master is the only buffer of a tensor in bf16; give it that buffer, or a master in f32"
    )]
    Halves {
        /// The parameter.
        name: String,
    },
    /// States that are not those of the rule.
    #[error(
        "parameter '{name}' is updated by {rule}, which keeps {needed} states of each element, but {found} were given"
    )]
    States {
        /// The parameter.
        name: String,
        /// The rule of its group.
        rule: &'static str,
        /// States of the rule.
        needed: usize,
        /// States given.
        found: usize,
    },
    /// A second moment that no gradients lead to.
    #[error(
        "parameter '{name}': second moment {index} is {value}, but a mean of squares is finite and not negative; was the state damaged?"
    )]
    SecondMoment {
        /// The parameter.
        name: String,
        /// The element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A gradient of another dtype.
    #[error(
        "parameter '{name}' takes {expected} gradients; register it with ParamSpec::grad set to the dtype you pass"
    )]
    GradDtype {
        /// The parameter.
        name: String,
        /// The dtype it was registered with.
        expected: &'static str,
    },
    /// A step without the gradient of a parameter.
    #[error(
        "parameter '{name}' has no gradient in this step ({missing} of {total} lack one); run its backward, or leave the parameter out of the step (Optimizer::leave_out)"
    )]
    MissingGradient {
        /// The first parameter without one.
        name: String,
        /// How many lack one.
        missing: usize,
        /// How many there are.
        total: usize,
    },
    /// A parameter that has a gradient on some ranks.
    #[error(
        "parameter '{name}' has a gradient on ranks {with:?} and none on ranks {without:?}{}; give it one on every rank (add `0 * param.sum()` to the loss), or on none",
        others(*.more)
    )]
    GradientOnSome {
        /// The first such parameter.
        name: String,
        /// Ranks on which it has one.
        with: Vec<usize>,
        /// Ranks on which it has none.
        without: Vec<usize>,
        /// How many more parameters ranks differ in.
        more: usize,
    },
    /// Matrices that ranks dealt among themselves differently.
    #[error(
        "ranks disagree on who makes which matrix orthogonal, as when a frozen matrix was thawed on some of them; make a new optimizer on every rank, and load the state of this one"
    )]
    OtherOwners,
    /// A parameter that a step leaves out, of which another one's scale is a part.
    #[error(
        "parameter '{missing}' has no gradient in this step, and '{present}', which has one, shares its scale; give both a gradient, or put them into different amax groups"
    )]
    SharedScale {
        /// The parameter without a gradient.
        missing: String,
        /// One with a gradient.
        present: String,
    },
    /// Step counts that would part, of parameters that a captured graph counts together.
    #[error(
        "parameter '{name}' would have another step count than parameters that a captured graph updates together with it; take a step over such gradients before the capture, or make a new optimizer"
    )]
    Captured {
        /// The first such parameter.
        name: String,
    },
    /// A hyperparameter or step option outside its range.
    #[error("{option} is {value}; it must be {expected}")]
    OptionValue {
        /// Which one.
        option: String,
        /// The value given.
        value: f32,
        /// What is allowed.
        expected: &'static str,
    },
    /// A parameter id of another optimizer.
    #[error(
        "the parameter id was given by another optimizer (this one has {len} parameters); use the ids that its own builder returned"
    )]
    OtherOptimizer {
        /// Number of parameters of this optimizer.
        len: usize,
    },
    /// A buffer that two parameters would both write.
    #[error(
        "parameters '{first}' and '{second}' write the same buffer; give each a separate tensor, or register a shared weight once"
    )]
    SharedBuffer {
        /// The first parameter.
        first: String,
        /// The second (the same name where one tensor holds a buffer twice).
        second: String,
    },
    /// A step that cannot be planned over other memory.
    #[error(
        "the parameters at the new addresses are not those that the step was planned for: {what}; make a new optimizer"
    )]
    Moved {
        /// What is different.
        what: String,
    },
    /// Ranks that step with different options or from different states.
    #[error(
        "the ranks disagree on {what} (rank {rank} of {world} differs from rank 0); give every rank the same groups, options and number of steps, and gradients reduced over replicas"
    )]
    Disagree {
        /// What differs.
        what: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
}

impl OptimError {
    /// Whether it says in what ranks differ.
    pub(crate) fn is_difference(&self) -> bool {
        matches!(
            self,
            Self::GradientOnSome { .. }
                | Self::OtherOwners
                | Self::Shard(ShardError::Comm(CommError::Mismatch { .. }))
        )
    }
}

impl From<CommError> for OptimError {
    fn from(error: CommError) -> Self {
        ShardError::from(error).into()
    }
}

/// That there are `more` such parameters.
fn others(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    }
}
