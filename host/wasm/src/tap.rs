//! A tap on the functions of the host: records what a call asks and gets, or answers from a recording instead of the node.
//!
//! A call without a tap costs one branch for each function. Lines of the log are recorded, and neither answered nor compared: they change
//! nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand_core::TryRng;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use wasmtime::component::HasData;
use wasmtime_wasi::clocks::{MonotonicClock, WallClock};
use wasmtime_wasi::{HostMonotonicClock, HostWallClock, Rng, WasiCtxBuilder, thread_rng};

use super::bindings::nodedock::driver::{
    claims, common, container_edits, device_nodes, host_files, inventory, log, net_interfaces,
    pci_driver, prepared_claims, progress, sysfs, sysfs_write,
};
use super::bindings::types;
use super::replay::{SHOWN_BYTES, shown_text};
use super::sandbox::State;
use nodedock_base::printable::cut;
use nodedock_core::recording::{Answer, Failure, HostCall, Raw, raw};
use nodedock_model::{Problem, ProblemCode};

const LOG: &str = "log.write";
const FAILED: &str = "host-function-failed";

/// The tap of one call. Clones share the state.
#[derive(Clone)]
pub(super) struct Tap(Arc<Mutex<Mode>>);

enum Mode {
    Recording(Recorded),
    Replaying(Replayed),
}

struct Recorded {
    calls: Vec<HostCall<Raw>>,
    bytes: usize,
    bytes_max: usize,
}

struct Replayed {
    expected: VecDeque<HostCall<Raw>>,
    done: usize,
    end: Option<ReplayEnd>,
}

/// Why a replayed call does not continue. Calls are as they are shown.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ReplayEnd {
    /// The host ended the recorded call here.
    AsRecorded,
    /// The driver calls something else.
    Differs {
        index: usize,
        expected: Option<String>,
        got: Option<String>,
    },
}

/// What a function of the host does.
enum Next {
    /// Its work.
    Run(Raw),
    /// Returns this.
    Return(Raw),
    /// Ends the call.
    Stop,
}

impl Tap {
    pub(super) fn recording(bytes_max: usize) -> Self {
        Self::new(Mode::Recording(Recorded {
            calls: Vec::new(),
            bytes: 0,
            bytes_max,
        }))
    }

    pub(super) fn replaying(calls: Vec<HostCall<Raw>>) -> Self {
        let expected = calls
            .into_iter()
            .filter(|call| call.function != LOG)
            .collect();
        Self::new(Mode::Replaying(Replayed {
            expected,
            done: 0,
            end: None,
        }))
    }

    fn new(mode: Mode) -> Self {
        Self(Arc::new(Mutex::new(mode)))
    }

    /// Takes what was recorded. None: it was more than the maximum.
    pub(super) fn take(&self) -> Option<Vec<HostCall<Raw>>> {
        match &mut *self.0.lock() {
            Mode::Recording(recorded) if recorded.bytes <= recorded.bytes_max => {
                Some(std::mem::take(&mut recorded.calls))
            }
            Mode::Recording(_) => None,
            Mode::Replaying(_) => Some(Vec::new()),
        }
    }

    /// Returns why the call ended before its answer, if it did, with the recorded calls that the driver did not repeat.
    pub(super) fn replay_end(&self) -> Option<ReplayEnd> {
        match &mut *self.0.lock() {
            Mode::Recording(_) => None,
            Mode::Replaying(replayed) => replayed.end.clone().or_else(|| {
                let expected = replayed.expected.pop_front()?;
                let expected = Some(shown_call(&expected.function, &expected.arguments));
                Some(ReplayEnd::Differs {
                    index: replayed.done,
                    expected,
                    got: None,
                })
            }),
        }
    }

    fn is_stopped(&self) -> bool {
        matches!(
            &*self.0.lock(),
            Mode::Replaying(Replayed { end: Some(_), .. })
        )
    }

    fn next(&self, function: &'static str, arguments: Raw) -> Next {
        match &mut *self.0.lock() {
            Mode::Recording(_) => Next::Run(arguments),
            Mode::Replaying(replayed) => replayed.next(function, &arguments),
        }
    }

    /// Keeps what a function returned.
    fn answered(&self, function: &'static str, arguments: Raw, answer: Answer<Raw>) {
        if let Mode::Recording(recorded) = &mut *self.0.lock() {
            let answer_bytes = match &answer {
                Answer::Returned(value) => value.get().len(),
                Answer::Failed(failure) => failure.message.len(),
            };
            recorded.bytes += function.len() + arguments.get().len() + answer_bytes + 64;
            if recorded.bytes <= recorded.bytes_max {
                recorded.calls.push(HostCall {
                    function: function.into(),
                    arguments,
                    answer,
                });
            } else {
                recorded.calls = Vec::new();
            }
        }
    }

    /// Reads the recorded answer of a function. None: it is no answer of this function.
    fn parsed<R: DeserializeOwned>(&self, function: &'static str, answer: &Raw) -> Option<R> {
        let parsed = serde_json::from_str(answer.get());
        if parsed.is_err()
            && let Mode::Replaying(replayed) = &mut *self.0.lock()
        {
            replayed.end = Some(ReplayEnd::Differs {
                index: replayed.done.saturating_sub(1),
                expected: Some(shown_call(function, &RawValue::NULL.to_owned())),
                got: None,
            });
        }
        parsed.ok()
    }

    /// A value of the node that is read without waiting. `none` stands for it after the replay has stopped.
    fn value<R: Serialize + DeserializeOwned>(
        &self,
        function: &'static str,
        arguments: &impl Serialize,
        read: impl FnOnce() -> R,
        none: R,
    ) -> R {
        match self.next(function, raw(arguments)) {
            Next::Run(arguments) => {
                let value = read();
                self.answered(function, arguments, Answer::Returned(raw(&value)));
                value
            }
            Next::Return(answer) => self.parsed(function, &answer).unwrap_or(none),
            Next::Stop => none,
        }
    }
}

impl Replayed {
    fn next(&mut self, function: &'static str, arguments: &Raw) -> Next {
        if self.end.is_some() {
            return Next::Stop;
        }
        let expected = self.expected.pop_front();
        self.done += 1;
        match expected {
            Some(expected)
                if expected.function == function && expected.arguments.get() == arguments.get() =>
            {
                match expected.answer {
                    Answer::Returned(value) => Next::Return(value),
                    Answer::Failed(_) => {
                        self.end = Some(ReplayEnd::AsRecorded);
                        Next::Stop
                    }
                }
            }
            expected => {
                let got = Some(shown_call(function, arguments));
                let expected = expected.map(|call| shown_call(&call.function, &call.arguments));
                self.end = Some(ReplayEnd::Differs {
                    index: self.done - 1,
                    expected,
                    got,
                });
                Next::Stop
            }
        }
    }
}

fn shown_call(function: &str, arguments: &Raw) -> String {
    cut(
        &format!("{} {}", shown_text(function), shown_text(arguments.get())),
        SHOWN_BYTES,
    )
}

/// The host as a driver has it: its functions, behind the tap of the call.
pub(super) struct Tapped<'a>(pub(super) &'a mut State);

/// Names [`Tapped`] to the linker.
pub(super) struct HasTapped;

impl HasData for HasTapped {
    type Data<'a> = Tapped<'a>;
}

/// A function that returns a problem. A replay that stops makes it a trap, in `convert_problem`.
macro_rules! tapped {
    ($tapped:ident, $name:literal, [$($argument:ident),*], $run:expr) => {{
        let Some(tap) = $tapped.0.tap.clone() else { return $run.await };
        let arguments: Vec<Raw> = vec![$(raw(&$argument)),*];
        match tap.next($name, raw(&arguments)) {
            Next::Run(arguments) => {
                let result = $run.await;
                tap.answered($name, arguments, Answer::Returned(raw(&result)));
                result
            }
            Next::Return(answer) => tap.parsed($name, &answer).unwrap_or_else(|| Err(stopped())),
            Next::Stop => Err(stopped()),
        }
    }};
}

/// A function without a problem, which can only trap.
macro_rules! tapped_plain {
    ($tapped:ident, $name:literal, [$($argument:ident),*], $run:expr) => {{
        let Some(tap) = $tapped.0.tap.clone() else { return $run.await };
        let arguments: Vec<Raw> = vec![$(raw(&$argument)),*];
        match tap.next($name, raw(&arguments)) {
            Next::Run(arguments) => {
                let result = $run.await;
                let answer = match &result {
                    Ok(value) => Answer::Returned(raw(value)),
                    Err(error) => Answer::Failed(failed(error)),
                };
                tap.answered($name, arguments, answer);
                result
            }
            Next::Return(answer) => tap.parsed($name, &answer).ok_or_else(trap),
            Next::Stop => Err(trap()),
        }
    }};
}

/// Stands for a problem until it becomes a trap.
fn stopped() -> Problem {
    Problem::internal(ProblemCode::DriverTrapped, "the replay stops here")
}

fn trap() -> wasmtime::Error {
    wasmtime::format_err!("the replay stops here")
}

fn failed(error: &wasmtime::Error) -> Failure {
    Failure {
        code: FAILED.to_owned(),
        message: error.root_cause().to_string(),
        by_time: false,
    }
}

impl inventory::Host for Tapped<'_> {}

impl claims::Host for Tapped<'_> {}

impl container_edits::Host for Tapped<'_> {}

impl common::Host for Tapped<'_> {
    fn convert_problem(&mut self, problem: Problem) -> wasmtime::Result<types::Problem> {
        if self.0.tap.as_ref().is_some_and(Tap::is_stopped) {
            return Err(trap());
        }
        common::Host::convert_problem(self.0, problem)
    }
}

impl log::Host for Tapped<'_> {
    fn write(
        &mut self,
        level: log::Level,
        message: String,
        fields: Vec<types::KeyValue>,
    ) -> wasmtime::Result<()> {
        if let Some(tap) = &self.0.tap {
            tap.answered(
                LOG,
                raw(&(&level, &message, &fields)),
                Answer::Returned(raw(&())),
            );
        }
        log::Host::write(self.0, level, message, fields)
    }
}

impl sysfs::Host for Tapped<'_> {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        tapped!(self, "sysfs.read", [path], sysfs::Host::read(self.0, path))
    }

    async fn read_bytes(&mut self, path: String) -> Result<Vec<u8>, Problem> {
        tapped!(
            self,
            "sysfs.read-bytes",
            [path],
            sysfs::Host::read_bytes(self.0, path)
        )
    }

    async fn read_dir(&mut self, path: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "sysfs.read-dir",
            [path],
            sysfs::Host::read_dir(self.0, path)
        )
    }

    async fn read_link(&mut self, path: String) -> Result<String, Problem> {
        tapped!(
            self,
            "sysfs.read-link",
            [path],
            sysfs::Host::read_link(self.0, path)
        )
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<String>, Problem> {
        tapped!(self, "sysfs.glob", [glob], sysfs::Host::glob(self.0, glob))
    }
}

impl sysfs_write::Host for Tapped<'_> {
    async fn write(&mut self, path: String, value: String) -> Result<(), Problem> {
        tapped!(
            self,
            "sysfs-write.write",
            [path, value],
            sysfs_write::Host::write(self.0, path, value)
        )
    }
}

impl host_files::Host for Tapped<'_> {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        tapped!(
            self,
            "host-files.read",
            [path],
            host_files::Host::read(self.0, path)
        )
    }

    async fn stat(&mut self, path: String) -> Result<host_files::FileInfo, Problem> {
        tapped!(
            self,
            "host-files.stat",
            [path],
            host_files::Host::stat(self.0, path)
        )
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<host_files::FileInfo>, Problem> {
        tapped!(
            self,
            "host-files.glob",
            [glob],
            host_files::Host::glob(self.0, glob)
        )
    }
}

impl pci_driver::Host for Tapped<'_> {
    async fn bind(&mut self, address: String, driver: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "pci-driver.bind",
            [address, driver],
            pci_driver::Host::bind(self.0, address, driver)
        )
    }

    async fn restore(&mut self, address: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "pci-driver.restore",
            [address],
            pci_driver::Host::restore(self.0, address)
        )
    }
}

impl device_nodes::Host for Tapped<'_> {
    async fn glob(&mut self, glob: String) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        tapped!(
            self,
            "device-nodes.glob",
            [glob],
            device_nodes::Host::glob(self.0, glob)
        )
    }

    async fn stat(&mut self, path: String) -> Result<device_nodes::NodeInfo, Problem> {
        tapped!(
            self,
            "device-nodes.stat",
            [path],
            device_nodes::Host::stat(self.0, path)
        )
    }
}

impl net_interfaces::Host for Tapped<'_> {
    async fn all(&mut self) -> Result<Vec<net_interfaces::NetInterface>, Problem> {
        tapped!(
            self,
            "net-interfaces.all",
            [],
            net_interfaces::Host::all(self.0)
        )
    }

    async fn get(&mut self, name: String) -> Result<net_interfaces::NetInterface, Problem> {
        tapped!(
            self,
            "net-interfaces.get",
            [name],
            net_interfaces::Host::get(self.0, name)
        )
    }
}

impl prepared_claims::Host for Tapped<'_> {
    async fn all(&mut self, after: Option<String>) -> wasmtime::Result<prepared_claims::Page> {
        tapped_plain!(
            self,
            "prepared-claims.all",
            [after],
            prepared_claims::Host::all(self.0, after)
        )
    }

    async fn using_device(
        &mut self,
        pool: String,
        device: String,
        after: Option<String>,
    ) -> wasmtime::Result<prepared_claims::Page> {
        tapped_plain!(
            self,
            "prepared-claims.using-device",
            [pool, device, after],
            prepared_claims::Host::using_device(self.0, pool, device, after)
        )
    }

    async fn get(&mut self, uid: String) -> wasmtime::Result<Option<types::ClaimRecord>> {
        tapped_plain!(
            self,
            "prepared-claims.get",
            [uid],
            prepared_claims::Host::get(self.0, uid)
        )
    }
}

impl progress::Host for Tapped<'_> {
    async fn save(&mut self, uid: String, progress: Vec<u8>) -> Result<(), Problem> {
        tapped!(
            self,
            "progress.save",
            [uid, progress],
            progress::Host::save(self.0, uid, progress)
        )
    }
}

/// Puts the clocks and random numbers of WASI behind the tap.
pub(super) fn tap_wasi(builder: &mut WasiCtxBuilder, tap: &Tap) {
    let clock = || Clock {
        tap: tap.clone(),
        wall: WallClock::new(),
        monotonic: MonotonicClock::new(),
    };
    builder.wall_clock(clock()).monotonic_clock(clock());
    let random = |function| Random {
        tap: tap.clone(),
        function,
        source: thread_rng(),
    };
    builder
        .secure_random(random("wasi-random.random"))
        .insecure_random(random("wasi-random.insecure"));
    let mut source = thread_rng();
    let seed = || std::array::from_fn(|_| source.next_u64());
    let [high, low] = tap.value("wasi-random.insecure-seed", &(), seed, [0u64; 2]);
    builder.insecure_random_seed(u128::from(high) << 64 | u128::from(low));
}

struct Clock {
    tap: Tap,
    wall: WallClock,
    monotonic: MonotonicClock,
}

impl HostWallClock for Clock {
    fn resolution(&self) -> Duration {
        self.tap.value(
            "wasi-wall-clock.resolution",
            &(),
            || self.wall.resolution(),
            Duration::ZERO,
        )
    }

    fn now(&self) -> Duration {
        self.tap.value(
            "wasi-wall-clock.now",
            &(),
            || self.wall.now(),
            Duration::ZERO,
        )
    }
}

impl HostMonotonicClock for Clock {
    fn resolution(&self) -> u64 {
        self.tap.value(
            "wasi-monotonic-clock.resolution",
            &(),
            || self.monotonic.resolution(),
            1,
        )
    }

    fn now(&self) -> u64 {
        self.tap.value(
            "wasi-monotonic-clock.now",
            &(),
            || self.monotonic.now(),
            u64::MAX,
        )
    }
}

struct Random {
    tap: Tap,
    function: &'static str,
    source: Box<dyn Rng + Send>,
}

impl TryRng for Random {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        let mut bytes = [0; 4];
        self.try_fill_bytes(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let mut bytes = [0; 8];
        self.try_fill_bytes(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        let Self {
            tap,
            function,
            source,
        } = self;
        let fill = || {
            let mut filled = vec![0; bytes.len()];
            source.fill_bytes(&mut filled);
            filled
        };
        let filled = tap.value(function, &bytes.len(), fill, Vec::new());
        // A recording that was edited may have fewer.
        bytes
            .iter_mut()
            .zip(filled)
            .for_each(|(byte, value)| *byte = value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a call reads of clocks and random numbers.
    fn readings(tap: &Tap) -> (Duration, u64, [u8; 5], u64) {
        let clock = Clock {
            tap: tap.clone(),
            wall: WallClock::new(),
            monotonic: MonotonicClock::new(),
        };
        let mut random = Random {
            tap: tap.clone(),
            function: "wasi-random.random",
            source: thread_rng(),
        };
        let mut bytes = [0; 5];
        random.fill_bytes(&mut bytes);
        (
            HostWallClock::now(&clock),
            HostMonotonicClock::now(&clock),
            bytes,
            random.next_u64(),
        )
    }

    #[test]
    fn clocks_and_random_numbers_are_replayed_and_what_was_not_read_differs() {
        let tap = Tap::recording(1 << 20);
        let recorded = readings(&tap);
        let calls = tap.take().unwrap();
        let names: Vec<_> = calls.iter().map(|call| call.function.as_ref()).collect();
        let random = "wasi-random.random";
        assert_eq!(
            names,
            [
                random,
                "wasi-wall-clock.now",
                "wasi-monotonic-clock.now",
                random
            ]
        );
        let again = Tap::replaying(calls.clone());
        assert_eq!((readings(&again), again.replay_end()), (recorded, None));
        let shorter = Tap::replaying(calls[..3].to_vec());
        let (wall, monotonic, bytes, number) = readings(&shorter);
        assert_eq!(
            (wall, monotonic, bytes, number),
            (recorded.0, recorded.1, recorded.2, 0)
        );
        let Some(ReplayEnd::Differs {
            index: 3,
            expected: None,
            got: Some(got),
        }) = shorter.replay_end()
        else {
            panic!("{:?}", shorter.replay_end())
        };
        assert_eq!(got, format!("{random} 8"));
    }

    #[test]
    fn an_answer_that_is_none_of_the_function_ends_the_replay() {
        let tap = Tap::recording(1 << 20);
        readings(&tap);
        let mut calls = tap.take().unwrap();
        calls[2].answer = Answer::Returned(raw(&"soon"));
        let edited = Tap::replaying(calls);
        readings(&edited);
        assert!(matches!(
            edited.replay_end(),
            Some(ReplayEnd::Differs {
                index: 2,
                got: None,
                ..
            })
        ));
    }

    #[test]
    fn more_than_the_maximum_is_not_kept() {
        let tap = Tap::recording(100);
        readings(&tap);
        assert!(tap.take().is_none());
    }
}
