//! CEL selectors of devices, evaluated as the Kubernetes scheduler evaluates them: parsed by the crate `cel`, checked against the declared
//! types of `device`, and run within a bounded number of steps. The evaluator is our own, since the interpreter of `cel` can neither be
//! interrupted nor bounded; so are the functions, since those of `cel` allocate without a bound.
//!
//! What the scheduler knows and this module refuses when it compiles an expression: bytes, timestamps and durations, addresses (`ip`,
//! `cidr`), `url`, `format`, the macros with two variables, and the functions of lists that make new ones (`sort`, `slice`, `flatten`, ...).
//!
//! Where it differs on purpose: a quantity is an integer if its amount is one (`1000m`), and has a digit (not `.`) and at most 38 in
//! billionths; a sum of quantities may be on either side of `==`; and `semver("1.0.0") in ["1.0.0"]` is false instead of an error.

use std::sync::Arc;

use nodedock_model::limit::EXPRESSION_BYTES_MAX;

mod check;
mod evaluate;
mod facts;
mod functions;
mod library;
mod macros;
mod parse;
mod pattern;
#[cfg(test)]
mod tests;
mod tree;
mod types;
mod value;

pub use facts::DeviceFacts;

/// Steps that are enough for any selector of practical use, and that end within some 50 milliseconds.
pub const STEPS_PER_EVALUATION: u64 = 500_000;

/// A compiled selector. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Selector {
    compiled: Arc<Compiled>,
}

#[derive(Debug)]
struct Compiled {
    expression: String,
    tree: tree::Node,
}

impl Selector {
    /// Parses an expression and checks its types. It takes a thread of its own for some milliseconds: the parser needs more stack than a
    /// caller's thread may have.
    ///
    /// # Errors
    ///
    /// Fails if the expression is longer than [`EXPRESSION_BYTES_MAX`] bytes or nested too deeply, if it is no CEL, if it uses a variable, a
    /// field or a function that does not exist or with other types than it takes, and if its result is no bool.
    pub fn compile(expression: &str) -> Result<Selector, SelectorError> {
        if expression.len() > EXPRESSION_BYTES_MAX {
            return Err(SelectorError::TooLong {
                length: expression.len(),
            });
        }
        let tree = parse::compile(expression)?;
        Ok(Self {
            compiled: Arc::new(Compiled {
                expression: expression.to_owned(),
                tree,
            }),
        })
    }

    /// Returns whether the selector chooses the device. `steps` is decreased by what the evaluation took.
    ///
    /// # Errors
    ///
    /// Fails if the expression reads an attribute that the device does not have or that has another type, if a function refuses its values,
    /// if the device is malformed, and with [`EvaluationError::OutOfSteps`].
    pub fn matches(
        &self,
        device: &DeviceFacts,
        steps: &mut Steps,
    ) -> Result<bool, EvaluationError> {
        evaluate::matches(&self.compiled.tree, device.value()?, steps)
    }

    /// Returns the text that was compiled.
    pub fn expression(&self) -> &str {
        &self.compiled.expression
    }
}

/// Why an expression is no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectorError {
    /// The expression is longer than [`EXPRESSION_BYTES_MAX`].
    #[error("the expression has {length} bytes, and at most {EXPRESSION_BYTES_MAX} are allowed")]
    TooLong {
        /// Length in bytes.
        length: usize,
    },
    /// The expression is no CEL, or its types do not fit.
    #[error("line {line}, column {column}: {problem}")]
    Malformed {
        /// Counted from one.
        line: usize,
        /// Column in characters, counted from one.
        column: usize,
        /// Description of the problem at this position.
        problem: String,
    },
    /// The parser's thread could not be started or failed.
    #[error("the parser failed on the expression")]
    Parser,
}

/// Why a selector has no verdict on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// The steps are used up.
    #[error("the evaluation takes more steps than it may")]
    OutOfSteps,
    /// The map or the list has no such element.
    #[error("no such key: {key}")]
    NoSuchKey {
        /// Key, as the expression has it.
        key: String,
    },
    /// A function or an operator does not take values of these types.
    #[error("no such overload: {function}")]
    NoSuchOverload {
        /// The function.
        function: &'static str,
    },
    /// The value can not be converted.
    #[error("{value:?} is no {wanted}")]
    NotConvertible {
        /// The value's text.
        value: String,
        /// A type.
        wanted: &'static str,
    },
    /// A result does not fit its type.
    #[error("the result of {function} is out of range")]
    OutOfRange {
        /// The function.
        function: &'static str,
    },
    /// A number is divided by zero.
    #[error("division by zero")]
    DivisionByZero,
    /// The value of an optional that has none was read.
    #[error("optional.none() has no value")]
    NoValue,
    /// A regular expression is malformed or too large.
    #[error("the regular expression {pattern:?} is malformed")]
    MalformedPattern {
        /// The pattern's text.
        pattern: String,
    },
    /// Lists or maps are nested too deeply to be compared.
    #[error("lists or maps are nested too deeply")]
    TooDeep,
    /// The device has an attribute or a capacity that can not be read.
    #[error("the device's attribute or capacity {name:?} is malformed")]
    MalformedDevice {
        /// Name with its domain, if it has one.
        name: String,
    },
}

/// Steps that an evaluation may still take: a step is a node of the expression, an element of a list or sixteen bytes of text. The bound
/// limits both time and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps(u64);

/// Bytes of text that count as one step.
const TEXT_PER_STEP: usize = 16;

impl Steps {
    /// Allows that many steps.
    pub fn new(steps: u64) -> Self {
        Self(steps)
    }

    /// Returns the steps that are left.
    pub fn left(&self) -> u64 {
        self.0
    }

    fn take(&mut self, steps: usize) -> Result<(), EvaluationError> {
        let left = u64::try_from(steps)
            .ok()
            .and_then(|steps| self.0.checked_sub(steps));
        self.0 = left.unwrap_or(0);
        left.map(|_| ()).ok_or(EvaluationError::OutOfSteps)
    }

    fn take_text(&mut self, bytes: usize) -> Result<(), EvaluationError> {
        self.take(bytes / TEXT_PER_STEP)
    }
}
