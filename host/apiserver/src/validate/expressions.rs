//! The CEL expressions in the selectors of an object: which there are, how many there may be, and what is wrong with each.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_allocator::selector::Selector;
use nodedock_model::limit::{EXPRESSION_BYTES_MAX, REQUESTS_MAX, SELECTORS_MAX, SUBREQUESTS_MAX};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::fields::{list, text};
use crate::resources::Resource;
use crate::status::Cause;

/// Different expressions of one object: each takes milliseconds to compile.
const EXPRESSIONS_MAX: usize = 256;
/// Maximum bytes of all different expressions of one object together.
const EXPRESSIONS_BYTES_MAX: usize = 256 << 10;

/// Expressions are compiled for one write at a time, so that they do not take every processor.
static COMPILING: Semaphore = Semaphore::const_new(1);

/// Returns the different expressions of an object that have to be compiled: those that `old`, which it replaces, does not have. A spec that
/// cannot change has none. Expressions and lists that are too long, which [`super::object`] refuses, are left out.
///
/// # Errors
///
/// If there are expressions to be compiled, and those of the whole object are too many or too long together.
pub(crate) fn new_expressions<'a>(
    resource: &Resource,
    new: &'a Value,
    old: Option<&Value>,
) -> Result<BTreeSet<&'a str>, Cause> {
    if old.is_some() && resource.plural != "deviceclasses" {
        return Ok(BTreeSet::new());
    }
    let all = expressions(resource, new);
    let known = old
        .map(|old| expressions(resource, old))
        .unwrap_or_default();
    let added: BTreeSet<&str> = all
        .iter()
        .copied()
        .filter(|it| !known.contains(it))
        .collect();
    let bytes = all.iter().map(|expression| expression.len()).sum::<usize>();
    let refused = |message: String| {
        Err(Cause {
            reason: "FieldValueTooMany",
            message,
            field: "spec".to_owned(),
        })
    };
    if added.is_empty() {
        Ok(added)
    } else if all.len() > EXPRESSIONS_MAX {
        let count = all.len();
        refused(format!(
            "Too many: {count}: must have at most {EXPRESSIONS_MAX} different CEL expressions"
        ))
    } else if bytes > EXPRESSIONS_BYTES_MAX {
        refused(format!(
            "Too many: {bytes}: different CEL expressions must have at most {EXPRESSIONS_BYTES_MAX} bytes together"
        ))
    } else {
        Ok(added)
    }
}

fn expressions<'a>(resource: &Resource, object: &'a Value) -> BTreeSet<&'a str> {
    let spec = &object["spec"];
    let selecting = match resource.plural {
        "deviceclasses" => vec![spec],
        "resourceclaims" => requests(&spec["devices"]),
        "resourceclaimtemplates" => requests(&spec["spec"]["devices"]),
        _ => vec![],
    };
    let selectors = selecting
        .into_iter()
        .flat_map(|it| bounded(it, "selectors", SELECTORS_MAX));
    let cel = selectors
        .map(|selector| &selector["cel"])
        .filter(|cel| !cel.is_null());
    cel.map(|cel| text(cel, "expression"))
        .filter(|it| it.len() <= EXPRESSION_BYTES_MAX)
        .collect()
}

/// Returns the parts of a claim's `spec.devices` that have selectors.
fn requests(devices: &Value) -> Vec<&Value> {
    let requests = bounded(devices, "requests", REQUESTS_MAX).iter();
    let parts = requests.flat_map(|it| {
        std::iter::once(&it["exactly"]).chain(bounded(it, "firstAvailable", SUBREQUESTS_MAX))
    });
    parts.collect()
}

/// A list, unless it has more than `most` items.
fn bounded<'a>(object: &'a Value, key: &str, most: usize) -> &'a [Value] {
    Some(list(object, key))
        .filter(|items| items.len() <= most)
        .unwrap_or_default()
}

/// Problem of each expression that was compiled, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Compiled(BTreeMap<String, Option<String>>);

impl Compiled {
    /// The expressions that are not compiled yet.
    pub(crate) fn missing(&self, expressions: &BTreeSet<&str>) -> BTreeSet<String> {
        let missing = expressions
            .iter()
            .filter(|expression| !self.0.contains_key(**expression));
        missing.map(|expression| (*expression).to_owned()).collect()
    }

    /// Compiles on this thread, which takes milliseconds for each expression.
    pub(crate) fn compile(&mut self, expressions: BTreeSet<String>) {
        self.0.extend(expressions.into_iter().map(|expression| {
            let problem = Selector::compile(&expression)
                .err()
                .map(|error| error.to_string());
            (expression, problem)
        }));
    }

    /// Compiles beside the threads that serve requests. Without the result, as of a panic, the expressions are still missing.
    pub(crate) async fn compile_apart(&mut self, expressions: BTreeSet<String>) {
        // The semaphore is never closed.
        let turn = COMPILING.acquire().await;
        let work = tokio::task::spawn_blocking(move || {
            // Also if the client goes away.
            let _turn = turn;
            let mut compiled = Self::default();
            compiled.compile(expressions);
            compiled.0
        });
        // no error: the expressions are still missing then, and compiled when the object is checked
        self.0.extend(work.await.unwrap_or_default());
    }

    /// Returns the problem of an expression; none for one that was not compiled, because the object had it before.
    pub(super) fn problem(&self, expression: &str) -> Option<&str> {
        self.0.get(expression)?.as_deref()
    }
}
