//! A thread that acts again and again while work is under way, for example to interrupt work that takes too long.
//!
//! The begin and the end of work set a timer of the kernel, and wake no thread: work that ends within one period costs two system calls and
//! no switch of threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// The timer fires at once.
const AT_ONCE: Duration = Duration::from_nanos(1);

/// The owner of the thread, which ends when this is dropped and no work is under way.
pub struct Ticker(Arc<Clock>);

/// Work under way, which ends when this is dropped.
pub struct Ticking(Arc<Clock>);

struct Clock {
    timer: OwnedFd,
    period: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of those that have begun work.
    running: usize,
    is_closed: bool,
}

impl Ticker {
    /// Starts the thread. `tick` is called once in each period of which work was under way at the end, first a whole period after the
    /// begin of the first work.
    ///
    /// # Errors
    ///
    /// The kernel gives no timer, or no thread.
    pub fn start(
        name: &str,
        period: Duration,
        tick: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let clock = Arc::new(Clock {
            timer,
            period,
            state: Mutex::default(),
        });
        // The same calls as later, which therefore do not fail.
        clock.set(period)?;
        clock.set(Duration::ZERO)?;
        let of_thread = clock.clone();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || of_thread.run(tick))?;
        Ok(Self(clock))
    }

    /// Begins work.
    pub fn begin(&self) -> Ticking {
        let mut state = self.0.state.lock();
        state.running += 1;
        if state.running == 1 {
            self.0.reset(self.0.period);
        }
        Ticking(self.0.clone())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        if state.running == 0 {
            self.0.reset(AT_ONCE);
        }
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.running -= 1;
        if state.running == 0 {
            let is_closed = state.is_closed;
            self.0
                .reset(if is_closed { AT_ONCE } else { Duration::ZERO });
        }
    }
}

impl Clock {
    fn run(&self, mut tick: impl FnMut()) {
        loop {
            let mut expirations = [0; 8];
            let waited =
                rustix::io::retry_on_intr(|| rustix::io::read(&self.timer, &mut expirations));
            if let Err(error) = waited {
                // Never of a timer that is open. Work must be interrupted all the same.
                tracing::error!(error = %io::Error::from(error), "a timer cannot be read");
                std::thread::sleep(self.period);
            }
            {
                let state = self.state.lock();
                match state.running {
                    0 if state.is_closed => return,
                    // The work ended after the timer had fired.
                    0 => continue,
                    _ => {}
                }
            }
            tick();
        }
    }

    /// Sets the time until the next tick; the others follow after a period each. Zero: none is due.
    fn set(&self, first: Duration) -> io::Result<()> {
        let [it_value, it_interval] =
            [first, self.period].map(|time| Timespec::try_from(time).map_err(io::Error::other));
        let times = Itimerspec {
            it_interval: it_interval?,
            it_value: it_value?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &times)?;
        Ok(())
    }

    fn reset(&self, first: Duration) {
        if let Err(error) = self.set(first) {
            // It was set at the start.
            tracing::error!(%error, "a timer cannot be set");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, RecvTimeoutError};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn ticker(period: Duration) -> (Ticker, mpsc::Receiver<()>) {
        let (sender, ticks) = mpsc::channel();
        let ticker = Ticker::start("ticker", period, move || {
            // A test that has ended counts no ticks.
            sender.send(()).ok();
        });
        (ticker.unwrap(), ticks)
    }

    #[test]
    fn work_ticks_until_it_ends() {
        let (ticker, ticks) = ticker(Duration::from_millis(1));
        for _ in 0..2 {
            let (one, other) = (ticker.begin(), ticker.begin());
            drop(one);
            for _ in 0..3 {
                ticks.recv_timeout(DEADLINE).unwrap();
            }
            drop(other);
        }
        // Also after the owner is gone.
        let last = ticker.begin();
        drop(ticker);
        ticks.recv_timeout(DEADLINE).unwrap();
        drop(last);
        let end = std::iter::repeat_with(|| ticks.recv_timeout(DEADLINE)).find_map(Result::err);
        assert_eq!(end, Some(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn short_work_does_not_tick() {
        let (ticker, ticks) = ticker(DEADLINE * 60);
        for _ in 0..100 {
            drop(ticker.begin());
        }
        drop(ticker);
        assert_eq!(
            ticks.recv_timeout(DEADLINE),
            Err(RecvTimeoutError::Disconnected)
        );
    }
}
