//! Memory that the allocator keeps after large and rare work.

/// Gives unused memory back to the system: compiling a driver takes many times what it leaves, and an allocator keeps that.
/// Costs about a millisecond; for use after such work only.
pub fn give_back() {
    // SAFETY: the function takes no pointers and may be called from any thread at any time (malloc_trim(3)).
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
