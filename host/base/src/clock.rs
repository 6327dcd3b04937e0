//! Wall-clock time for records and drivers. Timeouts use tokio's clock, which tests can pause.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use nodedock_proto::rfc3339;

/// Returns milliseconds since the Unix epoch; 0 if the clock is before it.
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, millis)
}

/// Returns the whole milliseconds of a duration.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the CPU time of the calling thread. Only the difference of two values is meaningful.
pub fn thread_cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the function writes to its argument and keeps no pointer (clock_gettime(2)).
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } != 0;
    if failed {
        return Duration::ZERO;
    }
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn busy_thread_uses_cpu_time() {
        let before = super::thread_cpu();
        let mut sum = 0u64;
        while super::thread_cpu() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(super::thread_cpu() > before);
    }

    #[test]
    fn times_are_formatted_without_overflow() {
        assert_eq!(super::rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(super::rfc3339(u64::MAX), u64::MAX.to_string());
    }
}
