//! Connections whose clients have not sent the token yet: few, of each user of the machine and in total, and each for a short time.
//!
//! One more takes the place of the oldest, so that no client keeps others out: of the same user, if it has as many as a user may have,
//! otherwise of the user that has the most.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A client with many requests under way at its start opens as many connections.
pub(crate) const STRANGERS_PER_USER_MAX: usize = 64;
/// Maximum number of connections without the token: in the worst case each has some 100 kB of handshake and headers.
pub(crate) const STRANGERS_MAX: usize = 128;

#[derive(Clone, Default)]
pub(crate) struct Strangers(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    next: u64,
    /// Open connections by number, the oldest first.
    open: BTreeMap<u64, Entry>,
}

struct Entry {
    /// None: not known, as of all clients where the kernel does not say.
    user: Option<u32>,
    end: CancellationToken,
}

/// One connection, until its client has sent the token or it ends.
pub(crate) struct Stranger {
    number: u64,
    end: CancellationToken,
    strangers: Strangers,
}

impl Strangers {
    /// Counts a connection, and ends another one if there are too many.
    pub(crate) fn enter(&self, user: Option<u32>) -> Stranger {
        let end = CancellationToken::new();
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.open.insert(
            number,
            Entry {
                user,
                end: end.clone(),
            },
        );
        if let Some(entry) = table
            .crowding(user)
            .and_then(|number| table.open.remove(&number))
        {
            entry.end.cancel();
        }
        drop(table);
        Stranger {
            number,
            end,
            strangers: self.clone(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The connection that has to end, after one of this user was added.
    fn crowding(&self, user: Option<u32>) -> Option<u64> {
        let mut counts = BTreeMap::<_, usize>::new();
        self.open
            .values()
            .for_each(|entry| *counts.entry(entry.user).or_default() += 1);
        let has_too_many = counts
            .get(&user)
            .is_some_and(|count| *count > STRANGERS_PER_USER_MAX);
        if !has_too_many && self.open.len() <= STRANGERS_MAX {
            return None;
        }
        // Of several users with as many, the one with the oldest connection: one user may have many numbers.
        let most = counts.values().copied().max()?;
        let ending = self.open.iter().find(|(_, entry)| match has_too_many {
            true => entry.user == user,
            false => counts[&entry.user] == most,
        });
        ending.map(|(number, _)| *number)
    }
}

impl Stranger {
    /// Resolves when the connection has to end for another one.
    pub(crate) fn ended(&self) -> WaitForCancellationFutureOwned {
        self.end.clone().cancelled_owned()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.table().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alive(strangers: &[Stranger]) -> usize {
        strangers
            .iter()
            .filter(|stranger| !stranger.end.is_cancelled())
            .count()
    }

    #[test]
    fn user_over_limit_loses_oldest_connection() {
        let strangers = Strangers::default();
        let others: Vec<_> = [Some(0), Some(7), None]
            .map(|user| strangers.enter(user))
            .into();
        let flood: Vec<_> = (0..1000).map(|_| strangers.enter(Some(1000))).collect();
        assert_eq!((alive(&others), alive(&flood)), (3, STRANGERS_PER_USER_MAX));
        assert_eq!(
            alive(&flood[1000 - STRANGERS_PER_USER_MAX..]),
            STRANGERS_PER_USER_MAX,
            "the newest"
        );
        let late = strangers.enter(Some(0));
        assert_eq!((alive(&others), alive(&flood)), (3, STRANGERS_PER_USER_MAX));
        drop((others, late, flood));
        assert!(strangers.table().open.is_empty());
    }

    #[test]
    fn busiest_user_loses_connections_first() {
        let strangers = Strangers::default();
        let quiet = strangers.enter(Some(0));
        let floods: Vec<_> = (0..100 * STRANGERS_MAX)
            .map(|n| strangers.enter(Some(1000 + (n % 50) as u32)))
            .collect();
        assert_eq!(alive(&floods), STRANGERS_MAX - 1);
        assert!(!quiet.end.is_cancelled());
    }

    /// A user with subordinate numbers: each connection was of another one, and the client with the highest number lost its connection each time.
    #[test]
    fn many_uids_do_not_block_clients() {
        let strangers = Strangers::default();
        let flood: Vec<_> = (0..STRANGERS_MAX)
            .map(|n| strangers.enter(Some(100_000 + n as u32)))
            .collect();
        let client = strangers.enter(Some(1_234_567_890));
        assert!(!client.end.is_cancelled());
        assert_eq!(alive(&flood), STRANGERS_MAX - 1);
    }

    #[test]
    fn authenticated_clients_are_not_counted() {
        let strangers = Strangers::default();
        let known = strangers.enter(Some(1000));
        let end = known.end.clone();
        drop(known);
        let _flood: Vec<_> = (0..1000).map(|_| strangers.enter(Some(1000))).collect();
        assert!(!end.is_cancelled());
    }
}
