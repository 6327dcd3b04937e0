//! Threads of another process that never wait, at normal priority: the load of a node on which pods start.

use std::hint::black_box;
use std::process::{Child, Command, Stdio};

use anyhow::Result;

/// Threads of the process.
const THREADS: usize = 2;

/// The process. It ends when this is dropped, and with this program, however that ends.
pub(crate) struct Busy(Child);

impl Busy {
    pub(crate) fn start() -> Self {
        let this = std::env::current_exe().expect("the system knows the path of a running program");
        let mut command = Command::new(this);
        command.args(["--spin", &THREADS.to_string()]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Self(child.expect("start this program once more"))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Keeps so many threads busy until the standard input ends, which is that of the program that has started this one.
pub(crate) fn spin(threads: usize) -> Result<()> {
    for _ in 0..threads {
        std::thread::spawn(count);
    }
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    Ok(())
}

fn count() {
    let mut number = 0_u64;
    loop {
        number = black_box(number.wrapping_add(1));
    }
}
