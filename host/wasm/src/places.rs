//! Which calls may run at once: so many, with so much memory, of one driver and of all.
//!
//! No driver may hold more than is still free, so that the first of many greedy ones leaves something for the last; those that are
//! slow or fail share a part of the whole. A call waits in turn for a place that fits it; who waits for its own driver's calls
//! holds nobody else up.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::stats::Limit;
use nodedock_model::limit::{
    CALL_MEMORY, CALLS_MAX, CALLS_MEMORY_MAX, SLOW_CALLS_MAX, SLOW_CALLS_MEMORY_MAX, SLOW_CALLS_PER_DRIVER,
};

/// What is left for drivers of the usual memory by calls that want more.
const LEFT_BY_LARGE_CALLS: usize = CALLS_MEMORY_MAX / 4;

/// What a call needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// The driver, by a number of its own.
    pub(super) owner: u64,
    /// It has to be content with the share of those that are slow or fail.
    pub(super) slow: bool,
    /// Linear memories of an instance.
    pub(super) memories: usize,
    /// Their bytes at most.
    pub(super) bytes: usize,
    /// Calls of the driver at once.
    pub(super) own_max: usize,
}

/// An amount of what calls hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Load {
    calls: usize,
    memories: usize,
    bytes: usize,
}

impl Load {
    fn add(&mut self, ask: &Ask) {
        self.calls += 1;
        self.memories += ask.memories;
        self.bytes += ask.bytes;
    }

    fn take(&mut self, ask: &Ask) {
        self.calls -= 1;
        self.memories -= ask.memories;
        self.bytes -= ask.bytes;
    }

    fn with(mut self, ask: &Ask) -> Self {
        self.add(ask);
        self
    }
}

/// What is held: by all, by the slow ones, by each driver.
#[derive(Default)]
struct Held {
    all: Load,
    slow: Load,
    owners: HashMap<u64, Owner>,
}

#[derive(Default, Clone, Copy)]
struct Owner {
    all: Load,
    slow_calls: usize,
}

impl Held {
    fn fits(&self, ask: &Ask) -> bool {
        let own = self.owners.get(&ask.owner).copied().unwrap_or_default();
        own.all.calls < ask.own_max && self.has_room(&own, ask) && (!ask.slow || self.slow_fits(&own, ask))
    }

    fn has_room(&self, own: &Owner, ask: &Ask) -> bool {
        let all = self.all.with(ask);
        let (Some(memories), Some(bytes)) =
            (CALLS_MAX.checked_sub(all.memories), CALLS_MEMORY_MAX.checked_sub(all.bytes))
        else {
            return false;
        };
        let is_modest = ask.bytes <= CALL_MEMORY || bytes >= LEFT_BY_LARGE_CALLS;
        let own = own.all.with(ask);
        is_modest && (own.calls == 1 || own.memories <= memories && own.bytes <= bytes)
    }

    fn slow_fits(&self, own: &Owner, ask: &Ask) -> bool {
        let slow = self.slow.with(ask);
        own.slow_calls < SLOW_CALLS_PER_DRIVER
            && slow.calls <= SLOW_CALLS_MAX
            && slow.memories <= SLOW_CALLS_MAX
            && slow.bytes <= SLOW_CALLS_MEMORY_MAX
    }

    fn add(&mut self, ask: &Ask) {
        let own = self.owners.entry(ask.owner).or_default();
        self.all.add(ask);
        own.all.add(ask);
        if ask.slow {
            self.slow.add(ask);
            own.slow_calls += 1;
        }
    }

    fn take(&mut self, ask: &Ask) {
        let Some(own) = self.owners.get_mut(&ask.owner) else { return };
        self.all.take(ask);
        own.all.take(ask);
        if ask.slow {
            self.slow.take(ask);
            own.slow_calls -= 1;
        }
        if own.all.calls == 0 {
            self.owners.remove(&ask.owner);
        }
    }
}

/// Handle to the places.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    held: Held,
    /// The oldest first.
    waiting: VecDeque<(Ask, oneshot::Sender<Place>)>,
}

/// A place; given back when dropped.
pub(super) struct Place {
    places: Places,
    ask: Ask,
}

impl Places {
    /// Returns when there is a place. Dropping the wait gives up the turn and nothing else.
    pub(super) async fn take(&self, ask: Ask) -> Place {
        let receiver = {
            let mut state = self.state();
            if !state.somebody_is_before(&ask) && state.held.fits(&ask) {
                state.held.add(&ask);
                return Place { places: self.clone(), ask };
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back((ask, sender));
            receiver
        };
        Turn { places: self, receiver }.comes().await
    }

    /// Whether no call is under way.
    #[cfg(test)]
    pub(super) fn are_all_free(&self) -> bool {
        self.state().held.all == Load::default()
    }

    /// What a call waits for: whether it is the driver's own calls, or those of all.
    pub(super) fn crowd(&self, ask: &Ask) -> (Limit, usize) {
        let own = self.state().held.owners.get(&ask.owner).map_or(0, |own| own.all.calls);
        if own >= ask.own_max { (Limit::DriverCalls, ask.own_max) } else { (Limit::NodeCalls, CALLS_MAX) }
    }

    /// Gives places to those who wait and fit now.
    fn serve(&self) {
        let served = self.state().serve(self);
        for (place, waiting) in served {
            // Who went away meanwhile leaves the place to the next.
            drop(waiting.send(place));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A wait in the queue. Those behind it no longer wait for one that is given up.
struct Turn<'a> {
    places: &'a Places,
    receiver: oneshot::Receiver<Place>,
}

impl Turn<'_> {
    async fn comes(mut self) -> Place {
        (&mut self.receiver).await.expect("whoever waits is served or goes away")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.receiver.close();
        self.places.serve();
    }
}

impl State {
    /// A driver's calls begin in the order in which they came.
    fn somebody_is_before(&self, ask: &Ask) -> bool {
        self.waiting.iter().any(|(other, waiting)| other.owner == ask.owner && !waiting.is_closed())
    }

    fn serve(&mut self, places: &Places) -> Vec<(Place, oneshot::Sender<Place>)> {
        let mut served = Vec::new();
        for (ask, waiting) in std::mem::take(&mut self.waiting) {
            if waiting.is_closed() {
                continue;
            }
            if !self.somebody_is_before(&ask) && self.held.fits(&ask) {
                self.held.add(&ask);
                served.push((Place { places: places.clone(), ask }, waiting));
            } else {
                self.waiting.push_back((ask, waiting));
            }
        }
        served
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let nobody_waits = {
            let mut state = self.places.state();
            state.held.take(&self.ask);
            state.waiting.is_empty()
        };
        if !nobody_waits {
            self.places.serve();
        }
    }
}

#[cfg(test)]
mod tests;
