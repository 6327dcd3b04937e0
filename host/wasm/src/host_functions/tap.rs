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
use wasmtime_wasi::clocks::{MonotonicClock, WallClock};
use wasmtime_wasi::{HostMonotonicClock, HostWallClock, Rng, WasiCtxBuilder, thread_rng};

use nodedock_base::printable::{cut, printable};
use nodedock_core::recording::{CallOutcome, HostCall, Raw, raw};

/// Bytes of a value in a difference.
const SHOWN_BYTES: usize = 400;
pub(super) const LOG: &str = "log.write";

/// The tap of one call. Clones share the state.
#[derive(Clone)]
pub(crate) struct Tap(Arc<Mutex<Mode>>);

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
pub(crate) enum ReplayEnd {
    /// The host ended the recorded call here.
    AsRecorded,
    /// The driver calls something else.
    Differs {
        index: usize,
        expected: Option<String>,
        got: Option<String>,
    },
}

/// Next action of a function of the host.
pub(super) enum Next {
    /// Its work.
    Run(Raw),
    /// Returns this.
    Return(Raw),
    /// Ends the call.
    Stop,
}

impl Tap {
    pub(crate) fn recording(bytes_max: usize) -> Self {
        Self::new(Mode::Recording(Recorded {
            calls: Vec::new(),
            bytes: 0,
            bytes_max,
        }))
    }

    pub(crate) fn replaying(calls: Vec<HostCall<Raw>>) -> Self {
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
    pub(crate) fn take(&self) -> Option<Vec<HostCall<Raw>>> {
        match &mut *self.0.lock() {
            Mode::Recording(recorded) if recorded.bytes <= recorded.bytes_max => {
                Some(std::mem::take(&mut recorded.calls))
            }
            Mode::Recording(_) => None,
            Mode::Replaying(_) => Some(Vec::new()),
        }
    }

    /// Returns why the call ended before its answer, if it did, with the recorded calls that the driver did not repeat.
    pub(crate) fn replay_end(&self) -> Option<ReplayEnd> {
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

    pub(super) fn is_stopped(&self) -> bool {
        matches!(
            &*self.0.lock(),
            Mode::Replaying(Replayed { end: Some(_), .. })
        )
    }

    pub(super) fn next(&self, function: &'static str, arguments: Raw) -> Next {
        match &mut *self.0.lock() {
            Mode::Recording(_) => Next::Run(arguments),
            Mode::Replaying(replayed) => replayed.next(function, &arguments),
        }
    }

    /// Keeps what a function returned.
    pub(super) fn answered(
        &self,
        function: &'static str,
        arguments: Raw,
        answer: CallOutcome<Raw>,
    ) {
        if let Mode::Recording(recorded) = &mut *self.0.lock() {
            let answer_bytes = match &answer {
                CallOutcome::Returned(value) => value.get().len(),
                CallOutcome::Failed(failure) => failure.message.len(),
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
    pub(super) fn parsed<R: DeserializeOwned>(
        &self,
        function: &'static str,
        answer: &Raw,
    ) -> Option<R> {
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

    /// Returns a value of the node that is read without waiting, or `none` after the replay has stopped.
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
                self.answered(function, arguments, CallOutcome::Returned(raw(&value)));
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
                    CallOutcome::Returned(value) => Next::Return(value),
                    CallOutcome::Failed(_) => {
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

/// A text of a driver, as a difference shows it.
pub(crate) fn shown_text(text: &str) -> String {
    printable(text, SHOWN_BYTES)
}

fn shown_call(function: &str, arguments: &Raw) -> String {
    cut(
        &format!("{} {}", shown_text(function), shown_text(arguments.get())),
        SHOWN_BYTES,
    )
}

/// Puts the clocks and random numbers of WASI behind the tap.
pub(crate) fn tap_wasi(builder: &mut WasiCtxBuilder, tap: &Tap) {
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
    let [high, low] = tap.value(
        "wasi-random.insecure-seed",
        &(),
        || std::array::from_fn(|_| source.next_u64()),
        [0u64; 2],
    );
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
        let filled = tap.value(
            function,
            &bytes.len(),
            || {
                let mut filled = vec![0; bytes.len()];
                source.fill_bytes(&mut filled);
                filled
            },
            Vec::new(),
        );
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

    /// Reads the clocks and random numbers, as a call does.
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
    fn clocks_and_random_numbers_are_replayed() {
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
    fn mistyped_answer_ends_the_replay() {
        let tap = Tap::recording(1 << 20);
        readings(&tap);
        let mut calls = tap.take().unwrap();
        calls[2].answer = CallOutcome::Returned(raw(&"soon"));
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
    fn oversized_recording_is_dropped() {
        let tap = Tap::recording(100);
        readings(&tap);
        assert!(tap.take().is_none());
    }
}
