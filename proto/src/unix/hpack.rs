//! Header compression (RFC 7541): decoding with a client's state, and encoding without state.
//!
//! Owns the dynamic table of one connection's requests, bounded by the size that servers advertise. The separate crates for this
//! (`hpack`, `loona-hpack`) build a hash map for every Huffman string and enforce no bounds; `h2` does not export its own, and the tests
//! compare this one with it.

use std::collections::VecDeque;

mod huffman;
mod table;
#[cfg(test)]
mod tests;

use table::STATIC;

/// The default SETTINGS_HEADER_TABLE_SIZE, which servers of tonic and hyper cannot change.
const TABLE_BYTES_MAX: usize = 4096;
/// Overhead of each entry of the table (RFC 7541, 4.1).
const ENTRY_OVERHEAD: usize = 32;
/// Bytes of an integer: 28 bits behind the prefix, far more than a valid block needs.
const INTEGER_BYTES_MAX: u32 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("the block ends within a field")]
    Cut,
    #[error("an integer is too large")]
    Integer,
    #[error("index {0} is in no table")]
    Index(usize),
    #[error("a Huffman string is wrong")]
    Huffman,
    #[error("a table size of {0} is more than was offered")]
    TableSize(usize),
    #[error("the table size changes behind the first field")]
    LateTableSize,
}

/// The dynamic table of a client's encoder.
#[derive(Debug)]
pub(super) struct Decoder {
    entries: VecDeque<Entry>,
    size: usize,
    size_max: usize,
}

#[derive(Debug)]
struct Entry {
    name: Box<[u8]>,
    value: Box<[u8]>,
}

impl Entry {
    fn size(&self) -> usize {
        self.name.len() + self.value.len() + ENTRY_OVERHEAD
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            size_max: TABLE_BYTES_MAX,
        }
    }
}

impl Decoder {
    /// Passes each field of a whole block to `field`. After an error the state is invalid.
    pub(super) fn decode<E: From<Malformed>>(
        &mut self,
        block: &[u8],
        mut field: impl FnMut(&[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut block = Cursor(block);
        // Buffer for decoded Huffman strings of all fields.
        let (mut name, mut value) = (Vec::new(), Vec::new());
        let mut fields = 0_usize;
        while let Some(&first) = block.0.first() {
            if first & 0xe0 == 0x20 {
                self.resize(block.integer(5)?, fields)?;
                continue;
            }
            fields += 1;
            if first & 0x80 != 0 {
                let (name, value) = self.get(block.integer(7)?)?;
                field(name, value)?;
                continue;
            }
            let indexed = first & 0x40 != 0;
            let name = match block.integer(if indexed { 6 } else { 4 })? {
                0 => block.string(&mut name)?,
                index => self.get(index)?.0,
            };
            let value = block.string(&mut value)?;
            field(name, value)?;
            if indexed {
                let entry = Entry {
                    name: name.into(),
                    value: value.into(),
                };
                self.insert(entry);
            }
        }
        Ok(())
    }

    fn get(&self, index: usize) -> Result<(&[u8], &[u8]), Malformed> {
        let position = index.checked_sub(1).ok_or(Malformed::Index(index))?;
        if let Some((name, value)) = STATIC.get(position) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let entry = self
            .entries
            .get(position - STATIC.len())
            .ok_or(Malformed::Index(index))?;
        Ok((&entry.name, &entry.value))
    }

    fn resize(&mut self, size_max: usize, fields_before: usize) -> Result<(), Malformed> {
        if fields_before > 0 {
            return Err(Malformed::LateTableSize);
        }
        if size_max > TABLE_BYTES_MAX {
            return Err(Malformed::TableSize(size_max));
        }
        self.size_max = size_max;
        self.evict(0);
        Ok(())
    }

    /// An entry that is larger than the table empties it (RFC 7541, 4.4).
    fn insert(&mut self, entry: Entry) {
        let size = entry.size();
        self.evict(size);
        if size <= self.size_max {
            self.size += size;
            self.entries.push_front(entry);
        }
    }

    /// Evicts entries until `size` bytes fit, or the table is empty.
    fn evict(&mut self, size: usize) {
        while self.size + size > self.size_max
            && let Some(oldest) = self.entries.pop_back()
        {
            self.size -= oldest.size();
        }
    }
}

/// Appends a field in the representation that neither uses nor changes the state.
pub(super) fn literal(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.push(0);
    string(name, out);
    string(value, out);
}

fn string(bytes: &[u8], out: &mut Vec<u8>) {
    let mut length = bytes.len();
    if length < 0x7f {
        out.push(length as u8);
    } else {
        out.push(0x7f);
        length -= 0x7f;
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
    }
    out.extend_from_slice(bytes);
}

/// The rest of a block.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn byte(&mut self) -> Result<u8, Malformed> {
        let (&first, rest) = self.0.split_first().ok_or(Malformed::Cut)?;
        self.0 = rest;
        Ok(first)
    }

    /// Decodes an integer that begins in the lowest `prefix` bits of the next byte (RFC 7541, 5.1).
    fn integer(&mut self, prefix: u32) -> Result<usize, Malformed> {
        let mask = u8::MAX >> (8 - prefix);
        let first = self.byte()? & mask;
        if first < mask {
            return Ok(usize::from(first));
        }
        let mut value = usize::from(mask);
        for position in 0..INTEGER_BYTES_MAX - 1 {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << (7 * position);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed::Integer)
    }

    fn string<'s>(&mut self, decoded: &'s mut Vec<u8>) -> Result<&'s [u8], Malformed>
    where
        'a: 's,
    {
        let huffman = self.0.first().is_some_and(|first| first & 0x80 != 0);
        let length = self.integer(7)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(Malformed::Cut)?;
        self.0 = rest;
        if !huffman {
            return Ok(bytes);
        }
        decoded.clear();
        huffman::decode(bytes, decoded)?;
        Ok(decoded)
    }
}
