//! The limits of a call's store: what a guest may allocate, and which limit an error of the engine is about.

use std::time::Duration;

use wasmtime::ResourceLimiter;
use wasmtime::component::ResourceTableError;

use crate::stats::Limit;
use nodedock_model::{Problem, ProblemCode};

/// Core instances, memories and tables of a call. Python components have some ten instances.
pub(crate) const CALL_INSTANCES: usize = 64;
pub(crate) const CALL_MEMORIES: usize = 16;
pub(crate) const CALL_TABLES: usize = 64;
/// Entries over all tables of a call: a driver's functions that are called by reference.
pub(crate) const CALL_TABLE_ELEMENTS: usize = 100_000;
/// Component-model handles of a store.
pub(crate) const HANDLES_MAX: usize = 256;

/// A limit at which something was refused, and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the driver {}", self.code_and_text().1)]
pub struct Reached {
    pub limit: Limit,
    pub max: usize,
}

impl Reached {
    /// The code of the problem that reports it.
    pub(crate) fn code(&self) -> ProblemCode {
        self.code_and_text().0
    }

    fn code_and_text(&self) -> (ProblemCode, String) {
        let (code, did, unit) = match self.limit {
            Limit::Cpu => (ProblemCode::DriverCpuLimit, "used more than", "ms of CPU"),
            Limit::Memory => (
                ProblemCode::DriverMemoryLimit,
                "wanted more than",
                "MiB of memory",
            ),
            Limit::Memories => (
                ProblemCode::DriverMemoriesLimit,
                "wanted more than",
                "memories",
            ),
            Limit::Tables => (ProblemCode::DriverTablesLimit, "wanted more than", "tables"),
            Limit::TableElements => (
                ProblemCode::DriverTableElementsLimit,
                "wanted more than",
                "entries over all its tables",
            ),
            Limit::Instances => (
                ProblemCode::DriverInstancesLimit,
                "wanted more than",
                "core instances",
            ),
            Limit::HostcallData => (
                ProblemCode::DriverAnswerTooLarge,
                "passed more than",
                "bytes at once",
            ),
            Limit::Handles => (
                ProblemCode::DriverHandlesLimit,
                "wanted more than",
                "handles at once",
            ),
            Limit::HostOperations => (
                ProblemCode::HostCallLimit,
                "called the host more than",
                "times in one call",
            ),
            Limit::HostBytes => (
                ProblemCode::HostCallLimit,
                "read more than",
                "bytes from the host in one call",
            ),
            Limit::SysfsWrites => (
                ProblemCode::HostCallLimit,
                "wanted to write more than",
                "values in one call",
            ),
            // Refusals at these limits have texts of their own.
            other @ (Limit::Wall
            | Limit::HostLook
            | Limit::AnswerEntries
            | Limit::AnswerBytes
            | Limit::Memo
            | Limit::ProblemBytes
            | Limit::LogLines
            | Limit::LogBytes
            | Limit::DriverCalls
            | Limit::NodeCalls) => (
                ProblemCode::HostCallLimit,
                "exceeded the limit of",
                other.as_str(),
            ),
        };
        let max = if self.limit == Limit::Memory {
            self.max >> 20
        } else {
            self.max
        };
        (code, format!("{did} {max} {unit}"))
    }
}

impl From<Reached> for Problem {
    fn from(reached: Reached) -> Self {
        Self::unavailable(reached.code(), reached.to_string())
    }
}

/// Sums the memory of all linear memories of a store, and the entries of all its tables.
pub(crate) struct Limiter {
    memory_max: usize,
    /// Bytes over all memories.
    pub(crate) memory: usize,
    /// Entries over all tables.
    pub(crate) table_elements: usize,
}

impl Limiter {
    pub(crate) fn new(memory_max: usize) -> Self {
        Self {
            memory_max,
            memory: 0,
            table_elements: 0,
        }
    }
}

/// Adds to what is used. Neither memories nor tables shrink: the current use is the peak.
fn grow(
    used: &mut usize,
    (current, desired): (usize, usize),
    limit: Limit,
    max: usize,
) -> wasmtime::Result<bool> {
    let wanted = used.saturating_add(desired.saturating_sub(current));
    if wanted > max {
        return Err(Reached { limit, max }.into());
    }
    *used = wanted;
    Ok(true)
}

/// The limit that a call's error is about. None: it is about something else.
pub(crate) fn reached(error: &wasmtime::Error, hostcall_bytes: usize) -> Option<Reached> {
    error
        .downcast_ref::<Reached>()
        .copied()
        .or_else(|| of_engine(error, hostcall_bytes))
}

/// Returns the limit that the engine itself enforced; for these it has no error types, only texts.
fn of_engine(error: &wasmtime::Error, hostcall_bytes: usize) -> Option<Reached> {
    if matches!(error.downcast_ref(), Some(ResourceTableError::Full)) {
        return Some(Reached {
            limit: Limit::Handles,
            max: HANDLES_MAX,
        });
    }
    let texts = [
        (
            "hostcalls has been exhausted",
            Limit::HostcallData,
            hostcall_bytes,
        ),
        ("handle limit exceeded", Limit::Handles, HANDLES_MAX),
        ("instance count too high", Limit::Instances, CALL_INSTANCES),
        ("memory count too high", Limit::Memories, CALL_MEMORIES),
        ("table count too high", Limit::Tables, CALL_TABLES),
    ];
    let root = error.root_cause().to_string();
    let found = texts.into_iter().find(|(text, ..)| root.contains(text));
    found.map(|(_, limit, max)| Reached { limit, max })
}

impl ResourceLimiter for Limiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        grow(
            &mut self.memory,
            (current, desired),
            Limit::Memory,
            self.memory_max,
        )
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        grow(
            &mut self.table_elements,
            (current, desired),
            Limit::TableElements,
            CALL_TABLE_ELEMENTS,
        )
    }

    fn instances(&self) -> usize {
        CALL_INSTANCES
    }

    fn tables(&self) -> usize {
        CALL_TABLES
    }

    fn memories(&self) -> usize {
        CALL_MEMORIES
    }
}

/// Milliseconds, for a limit's value.
pub(crate) fn millis(time: Duration) -> usize {
    usize::try_from(time.as_millis()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wasmtime::{Engine, Instance, Module, Store};

    /// Instantiates modules in one store, as an engine without a pool does for a component.
    fn instantiate(text: &str, times: usize) -> Result<Limiter, Option<Reached>> {
        let engine = Engine::default();
        let module = Module::new(&engine, wat::parse_str(text).unwrap()).unwrap();
        let mut store = Store::new(&engine, Limiter::new(64 << 20));
        store.limiter(|limiter| limiter);
        for _ in 0..times {
            if let Err(error) = Instance::new(&mut store, &module, &[]) {
                return Err(super::reached(&error, 1));
            }
        }
        Ok(store.into_data())
    }

    fn reached(text: &str, times: usize) -> Reached {
        instantiate(text, times)
            .map(drop)
            .unwrap_err()
            .expect("a limit is named")
    }

    #[test]
    fn exceeded_store_limit_is_named() {
        // There may be as many tables as instances: two in each module.
        for (text, within, limit, max) in [
            ("(module)", CALL_INSTANCES, Limit::Instances, CALL_INSTANCES),
            (
                "(module (memory 0))",
                CALL_MEMORIES,
                Limit::Memories,
                CALL_MEMORIES,
            ),
            (
                "(module (table 1 funcref) (table 1 funcref))",
                CALL_TABLES / 2,
                Limit::Tables,
                CALL_TABLES,
            ),
        ] {
            assert!(instantiate(text, within).is_ok(), "{text}");
            let reached = reached(text, within + 1);
            assert_eq!((reached.limit, reached.max), (limit, max), "{text}");
            assert!(reached.to_string().contains(&max.to_string()), "{reached}");
        }
    }

    #[test]
    fn store_limits_sum_over_instances() {
        let used = instantiate("(module (memory 2) (table 10 funcref))", 3).unwrap();
        assert_eq!((used.memory, used.table_elements), (6 * (64 << 10), 30));
        assert_eq!(reached("(module (memory 400))", 3).limit, Limit::Memory);
        let tables = reached("(module (table 40000 funcref))", 3);
        assert_eq!(
            (tables.limit, tables.max),
            (Limit::TableElements, CALL_TABLE_ELEMENTS)
        );
    }

    #[test]
    fn another_error_is_about_no_limit() {
        let error = wasmtime::Error::msg("instance went away");
        assert_eq!(super::reached(&error, 1), None);
    }

    #[test]
    fn every_limit_says_its_value() {
        for limit in Limit::ALL {
            let reached = Reached {
                limit: *limit,
                max: 7 << 20,
            };
            let value = if *limit == Limit::Memory {
                "7 MiB"
            } else {
                "7340032"
            };
            assert!(reached.to_string().contains(value), "{reached}");
            assert!(!limit.as_str().is_empty());
        }
    }
}
