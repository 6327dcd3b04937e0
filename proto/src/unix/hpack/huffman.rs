//! Huffman strings (RFC 7541, appendix B).
//!
//! The code is canonical: codes of one length are consecutive, in the order of their symbols, and follow those that are shorter.
//! The lengths therefore determine the codes.

use super::Malformed;

const SYMBOLS: usize = 257;
/// End of string: no string may contain it, and its first bits are the padding.
const EOS: u16 = 256;
const LENGTH_MIN: usize = 5;
const LENGTH_MAX: usize = 30;

/// Bits of each symbol's code.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// The codes of one length.
#[derive(Clone, Copy)]
struct Codes {
    first: u64,
    count: u64,
    /// Index of the first symbol in `BY_CODE`.
    position: usize,
}

static CODES: [Codes; LENGTH_MAX + 1] = codes();
static BY_CODE: [u16; SYMBOLS] = symbols_by_code();

const fn codes() -> [Codes; LENGTH_MAX + 1] {
    let mut codes = [Codes {
        first: 0,
        count: 0,
        position: 0,
    }; LENGTH_MAX + 1];
    let mut symbol = 0;
    while symbol < SYMBOLS {
        codes[LENGTHS[symbol] as usize].count += 1;
        symbol += 1;
    }
    let mut length = 1;
    while length <= LENGTH_MAX {
        let shorter = codes[length - 1];
        codes[length].first = (shorter.first + shorter.count) << 1;
        codes[length].position = shorter.position + shorter.count as usize;
        length += 1;
    }
    codes
}

const fn symbols_by_code() -> [u16; SYMBOLS] {
    let mut symbols = [0; SYMBOLS];
    let (mut next, mut length) = (0, 0);
    while length <= LENGTH_MAX {
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as usize == length {
                symbols[next] = symbol as u16;
                next += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    symbols
}

/// Decodes `encoded` and appends the result to `decoded`.
pub(super) fn decode(encoded: &[u8], decoded: &mut Vec<u8>) -> Result<(), Malformed> {
    // The lowest `count` bits are not decoded yet: a byte, and less than the longest code before it.
    let (mut bits, mut count) = (0_u64, 0);
    for &byte in encoded {
        bits = bits << 8 | u64::from(byte);
        count += 8;
        while let Some((symbol, length)) = first_symbol(bits, count) {
            decoded.push(u8::try_from(symbol).map_err(|_| Malformed::Huffman)?);
            count -= length;
            bits &= (1 << count) - 1;
        }
    }
    // Less than a byte, and all ones.
    if count < 8 && bits == (1 << count) - 1 {
        Ok(())
    } else {
        Err(Malformed::Huffman)
    }
}

fn first_symbol(bits: u64, count: usize) -> Option<(u16, usize)> {
    (LENGTH_MIN..=count.min(LENGTH_MAX)).find_map(|length| {
        let codes = CODES[length];
        let index = (bits >> (count - length)).checked_sub(codes.first)?;
        (index < codes.count).then(|| (BY_CODE[codes.position + index as usize], length))
    })
}

/// The codes use up all sequences of 30 bits, and the last one is the end of a string.
const _: () = {
    let longest = codes()[LENGTH_MAX];
    assert!(
        longest.first + longest.count == 1 << LENGTH_MAX && symbols_by_code()[SYMBOLS - 1] == EOS
    );
};
