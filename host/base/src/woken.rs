//! Tasks that a thread of the runtime has woken: tokio keeps the last of them for that thread, and no other thread takes it.
//!
//! Code that wakes tasks during a request notes it here. Code that may block the thread for long releases the task before, which wakes
//! another thread; so it does that only if there may be one.

use std::cell::Cell;

use tokio::runtime::Handle;

thread_local! {
    static HAS_WOKEN: Cell<bool> = const { Cell::new(false) };
}

/// Notes that this thread may have woken a task.
pub fn note() {
    HAS_WOKEN.set(true);
}

/// Lets other threads take the task that this one has woken last, if it may have woken one since the last call: an empty task takes its
/// place.
pub fn release() {
    if HAS_WOKEN.take()
        && let Ok(runtime) = Handle::try_current()
    {
        drop(runtime.spawn(async {}));
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Handle;

    use super::*;

    #[tokio::test]
    async fn only_noted_wake_is_released() {
        let tasks = || Handle::current().metrics().num_alive_tasks();
        release();
        assert_eq!(tasks(), 0);
        note();
        release();
        release();
        assert_eq!(tasks(), 1);
    }
}
