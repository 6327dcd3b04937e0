//! Releases memory that the allocator keeps after large and rare work.

/// Returns unused memory to the system: loading a driver temporarily needs far more memory than its result, and the allocator keeps it.
/// Costs about a millisecond; for use after such work only.
pub fn release() {
    // SAFETY: the function takes no pointers and may be called from any thread at any time (malloc_trim(3)).
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
