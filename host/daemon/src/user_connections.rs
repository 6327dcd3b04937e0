//! Connections of users other than root: which users may have them, and how many.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use nodedock_base::users;

/// Connections that a user may have to both sockets together. A client has one for each watch.
const CONNECTIONS_MAX: usize = 64;

/// Numbers of open connections, by user. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct UserConnections(Arc<Mutex<BTreeMap<u32, usize>>>);

/// A connection that counts until this is dropped.
#[derive(Debug)]
pub struct UserConnection {
    user: u32,
    connections: UserConnections,
}

impl UserConnections {
    /// Counts a connection. `None`: the user has as many as possible, or may have none.
    pub fn enter(&self, user: u32) -> Option<UserConnection> {
        if !may_connect(user) {
            return None;
        }
        let mut connections = self.0.lock();
        let count = connections.entry(user).or_default();
        if *count >= CONNECTIONS_MAX {
            return None;
        }
        *count += 1;
        drop(connections);
        Some(UserConnection {
            user,
            connections: self.clone(),
        })
    }
}

impl Drop for UserConnection {
    fn drop(&mut self) {
        let mut connections = self.connections.0.lock();
        if let Some(count) = connections.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                connections.remove(&self.user);
            }
        }
    }
}

/// Returns whether a user may connect: one that another user may be in a user namespace would add to the quota of that user.
fn may_connect(user: u32) -> bool {
    match users::is_subordinate(user) {
        Ok(is_subordinate) => !is_subordinate,
        Err(error) => {
            tracing::warn!(%error, user, "a user is refused: the subordinate users cannot be read");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_bounded_connections() {
        let connections = UserConnections::default();
        let open: Vec<_> = (0..CONNECTIONS_MAX)
            .map(|_| connections.enter(1).unwrap())
            .collect();
        assert!(connections.enter(1).is_none());
        assert!(connections.clone().enter(2).is_some());
        drop(open);
        assert!(connections.enter(1).is_some());
        assert!(connections.0.lock().is_empty());
    }
}
