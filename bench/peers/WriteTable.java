import java.util.Date;
import java.util.UUID;
import org.apache.cassandra.io.sstable.CQLSSTableWriter;

/**
 * Writes the rows of bench/scan.py as SSTables, ten times faster than a client could insert them:
 * {@code java … WriteTable.java FOLDER CREATE_TABLE INSERT ROWS ROWS_OF_A_PARTITION}.
 */
class WriteTable {
    public static void main(String[] arguments) throws Exception {
        String folder = arguments[0];
        long rows = Long.parseLong(arguments[3]);
        int partitionRows = Integer.parseInt(arguments[4]);
        try (CQLSSTableWriter writer = CQLSSTableWriter.builder()
                .inDirectory(folder)
                .forTable(arguments[1])
                .using(arguments[2])
                .withBufferSizeInMiB(16)
                .build()) {
            for (long row = 0; row < rows; row++) {
                writer.addRow(
                        "customer-" + row / partitionRows,
                        (int) (row % partitionRows),
                        (int) (row * 7 % Integer.MAX_VALUE),
                        row * 1_000_003,
                        "name number " + row % 1000,
                        new Date(1_700_000_000_000L + row),
                        row / 3.0,
                        new UUID(row * 0x9E3779B97F4A7C15L, row * 0xC2B2AE3D27D4EB4FL),
                        1_700_000_000_000_000L + row);
            }
        }
        // Cassandra leaves threads behind.
        System.exit(0);
    }
}
