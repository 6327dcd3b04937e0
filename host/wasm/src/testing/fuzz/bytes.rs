//! Values out of bytes, each from the bytes where the one before ended: a change of one byte changes one value, which is what a fuzzer
//! can learn from. Behind the last byte there are zeros, and a zero is always a usual value.

/// Lengths about which the bounds of `nodedock_model::limit` say something.
const LENGTHS: &[usize] = &[
    0, 15, 16, 32, 33, 63, 64, 65, 128, 253, 254, 255, 256, 257, 316, 317, 1024, 1025, 4096, 4097,
    10_240, 10_241, 65_536, 65_537,
];

/// Counts of entries, likewise.
const COUNTS: &[usize] = &[8, 9, 10, 11, 16, 17, 32, 33, 48, 49, 64, 65, 256, 4097];

/// Characters that are not allowed in a name or a line.
const ODD: &[&str] = &[
    "\0", "\n", "\r", "\u{1b}", "\u{7f}", "\u{85}", "\u{2028}", "\u{feff}", "\u{ffff}", "😀",
    "\u{fc}", " ", "=", "/", "/..", ":", ",", "\"", "\\", "#", "*", "..", "-", "A",
];

pub(super) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// One of some letters: the one that is there, or any.
    pub(super) fn letter(&mut self, letters: &[u8]) -> u8 {
        let byte = self.byte();
        if letters.contains(&byte) {
            byte
        } else {
            letters[usize::from(byte) % letters.len()]
        }
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    pub(super) fn flag(&mut self) -> bool {
        self.byte() % 2 == 1
    }

    /// Small as a rule.
    pub(super) fn number(&mut self) -> u32 {
        match self.byte() {
            byte @ 0..=239 => byte.into(),
            _ => u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()]),
        }
    }

    pub(super) fn option<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.byte() % 4 == 1).then(|| value(self))
    }

    /// None to three entries as a rule, and seldom as many as a bound allows, or one more.
    pub(super) fn list<T>(&mut self, mut entry: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = match self.byte() {
            byte @ 0..=239 => usize::from(byte % 4),
            _ => self.pick(COUNTS),
        };
        (0..count).map(|_| entry(self)).collect()
    }

    /// One of some usual texts as a rule; else what is near it, too long, or anything.
    pub(super) fn text(&mut self, usual: &[&str]) -> String {
        match self.byte() {
            byte @ 0..=191 => usual[usize::from(byte) % usual.len()].to_owned(),
            192..=207 => format!("{}{}", self.pick(usual), self.pick(ODD)),
            208..=223 => format!("{}{}", self.pick(usual), self.byte()),
            224..=239 => "x".repeat(self.pick(LENGTHS)),
            _ => {
                let length = usize::from(self.byte()).min(self.0.len());
                let (text, rest) = self.0.split_at(length);
                self.0 = rest;
                String::from_utf8_lossy(text).into_owned()
            }
        }
    }

    /// Bytes of any length, of which only the length matters.
    pub(super) fn blob(&mut self) -> Vec<u8> {
        let filler = self.byte();
        vec![filler; self.pick(LENGTHS)]
    }
}
