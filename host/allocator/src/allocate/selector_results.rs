//! Compiled selectors and their results on the devices of one inventory, each evaluated once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::selector::{DeviceFacts, STEPS_PER_EVALUATION, Selector, Steps};

/// Expressions that are kept with their results. A machine has a few classes and a few kinds of claims; with 5,000 devices an expression
/// takes 40 kB.
const EXPRESSIONS_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SelectorResult {
    Matches,
    Differs,
    Failed,
}

/// The selectors that were evaluated on an inventory.
#[derive(Debug)]
pub(super) struct SelectorResults {
    devices: usize,
    by_expression: Mutex<HashMap<String, Arc<Column>>>,
}

impl SelectorResults {
    pub(super) fn new(devices: usize) -> Self {
        Self {
            devices,
            by_expression: Mutex::default(),
        }
    }

    /// Returns the column of an expression, compiled if it is not there. A full table begins again with this one.
    pub(super) fn column(&self, expression: &str) -> Arc<Column> {
        let mut columns = self
            .by_expression
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(column) = columns.get(expression) {
            return Arc::clone(column);
        }
        if columns.len() >= EXPRESSIONS_MAX {
            columns.clear();
        }
        let column = Arc::new(Column::new(expression, self.devices));
        columns.insert(expression.to_owned(), Arc::clone(&column));
        column
    }
}

/// One expression and its result on each device.
pub(super) struct Column {
    selector: Result<Selector, String>,
    /// Zero: not evaluated. Else the result in the two low bits, and the steps that it took above them.
    cells: Vec<AtomicU64>,
}

impl std::fmt::Debug for Column {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Column")
            .field("devices", &self.cells.len())
            .finish_non_exhaustive()
    }
}

impl Column {
    fn new(expression: &str, devices: usize) -> Self {
        let selector = Selector::compile(expression).map_err(|error| error.to_string());
        Self {
            selector,
            cells: std::iter::repeat_with(AtomicU64::default)
                .take(devices)
                .collect(),
        }
    }

    /// Returns the result on a device and the steps of its evaluation, which are the same whether it was evaluated before or not.
    pub(super) fn result(&self, device: u32, facts: &DeviceFacts) -> (SelectorResult, u64) {
        let cell = self.cells.get(device as usize);
        let known = cell.map_or(0, |cell| cell.load(Ordering::Relaxed));
        let value = match known {
            0 => self.evaluate(facts),
            known => known,
        };
        if let Some(cell) = cell.filter(|_| known == 0) {
            cell.store(value, Ordering::Relaxed);
        }
        let result = match value & 3 {
            1 => SelectorResult::Matches,
            2 => SelectorResult::Differs,
            _ => SelectorResult::Failed,
        };
        (result, value >> 2)
    }

    fn evaluate(&self, facts: &DeviceFacts) -> u64 {
        let mut steps = Steps::new(STEPS_PER_EVALUATION);
        let result = match self
            .selector
            .as_ref()
            .map(|selector| selector.matches(facts, &mut steps))
        {
            Ok(Ok(true)) => 1,
            Ok(Ok(false)) => 2,
            Ok(Err(_)) | Err(_) => 3,
        };
        result | STEPS_PER_EVALUATION.saturating_sub(steps.left()) << 2
    }

    /// Returns why the result on a device is [`SelectorResult::Failed`].
    pub(super) fn failure(&self, facts: &DeviceFacts) -> String {
        match &self.selector {
            Err(error) => format!("cannot be compiled: {error}"),
            Ok(selector) => match selector.matches(facts, &mut Steps::new(STEPS_PER_EVALUATION)) {
                Err(error) => format!("failed: {error}"),
                Ok(_) => "failed".to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::Device;

    use super::*;

    #[test]
    fn cached_verdict_equals_evaluated_verdict() {
        let facts = DeviceFacts::new("gpu.example.com", &Device::default());
        let results = SelectorResults::new(1);
        for (expression, expected) in [
            (
                "device.driver == \"gpu.example.com\"",
                SelectorResult::Matches,
            ),
            (
                "device.driver == \"nic.example.com\"",
                SelectorResult::Differs,
            ),
            (
                "device.attributes[\"gpu.example.com\"].model == \"a\"",
                SelectorResult::Failed,
            ),
            ("device.", SelectorResult::Failed),
        ] {
            let first = results.column(expression).result(0, &facts);
            assert_eq!(first.0, expected, "{expression}");
            assert_eq!(
                results.column(expression).result(0, &facts),
                first,
                "{expression}"
            );
        }
        let failure = results.column("device.").failure(&facts);
        assert!(failure.starts_with("cannot be compiled: "), "{failure}");
    }

    #[test]
    fn the_number_of_expressions_is_bounded() {
        let results = SelectorResults::new(1);
        for number in 0..=EXPRESSIONS_MAX {
            results.column(&format!("device.driver == \"{number}\""));
        }
        assert_eq!(results.by_expression.lock().expect("not poisoned").len(), 1);
    }
}
